// Passes over a rank's flat shard: its norm, and an optimizer step. The CUDA versions
// (cuda/shard.h) give the same bits.
#pragma once

#include <cstdint>

#include "adamw.h"
#include "dtype.h"

namespace fsdpx {

// A squared norm, and 1 where some element is not finite, else 0.
struct NormAndCheck {
  double square;
  double not_finite;
};

// Of `numel` elements of float32, float64, float16 or bfloat16, in fp32 (fp64 for float64). The
// order of additions depends on nothing but `numel`. Tiles t, t + kNormSums, t + 2 * kNormSums, ...
// of kNormTile elements belong together: element i of each is added to sum i % kNormSums, and those
// sums are added in pairs of neighbours until one is left. What is left of all t, again kNormSums
// numbers, is added in pairs of neighbours too.
NormAndCheck norm_and_check(const void* src, DType dtype, int64_t numel);
inline constexpr int64_t kNormTile = 8192;
inline constexpr int64_t kNormSums = 2048;

// One AdamW step on `numel` elements of float32, in place. `grad` is float32, float16 or bfloat16.
// Where `copy` is not null, the new parameters go there too, as `copy_dtype` (float16 or bfloat16):
// what the next all-gather sends.
struct AdamWShard {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  DType grad_dtype;
  void* copy;
  DType copy_dtype;
  int64_t numel;
};
void adamw(const AdamWShard& shard, const AdamWOptions& options);

// What both versions check. `operation` names the caller in messages.
void check_norm(const char* operation, const void* src, DType dtype, int64_t numel);
void check_adamw(const char* operation, const AdamWShard& shard, const AdamWOptions& options);

}  // namespace fsdpx
