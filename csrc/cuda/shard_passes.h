// The passes of ../shard_passes.h on a GPU, enqueued on a stream; see kernels.h for what holds of
// all.
#pragma once

#include "../shard_passes.h"

namespace fsdpx::cuda {

// out[0] is the squared norm and out[1] 1 where some element is not finite, else 0: two floats, for
// float64 two doubles. `workspace` holds kNormWorkspace bytes until the stream has passed.
inline constexpr int64_t kNormWorkspace = 2 * kNormSums * static_cast<int64_t>(sizeof(double));
void norm_and_check(const void* src, DType dtype, int64_t numel, void* workspace, void* out,
                    void* stream);

void adamw(const AdamWShard& shard, const AdamWOptions& options, void* stream);

}  // namespace fsdpx::cuda
