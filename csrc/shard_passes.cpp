// Passes over a rank's flat shard on CPU. See shard_passes.h.
#include "shard_passes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "check.h"
#include "float_environment.h"

namespace fsdpx {
namespace {

template <typename Acc>
using Sums = std::array<Acc, kNormSums>;

// Adds neighbours until one number is left.
template <typename Acc>
Acc collapse(Sums<Acc>& sums) {
  for (size_t left = kNormSums / 2; left >= 1; left /= 2) {
    for (size_t i = 0; i < left; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

// Zero times an element is zero, unless the element is not finite.
template <typename T, typename Acc>
void add_tile(const T* src, int64_t numel, Sums<Acc>& squares, Sums<Acc>& zeros) {
  for (int64_t begin = 0; begin < numel; begin += kNormSums) {
    const size_t count = static_cast<size_t>(std::min(kNormSums, numel - begin));
    for (size_t i = 0; i < count; ++i) {
      const Acc value = widen<Acc>(src[begin + static_cast<int64_t>(i)]);
      squares[i] += value * value;
      zeros[i] += value * Acc{0};
    }
  }
}

template <typename T>
NormAndCheck norm_of(const T* src, int64_t numel) {
  using Acc = Accumulator<T, float>;
  struct Work {
    Sums<Acc> squares, zeros, all_squares{}, all_zeros{};
  };
  const auto work = std::make_unique<Work>();
  constexpr int64_t kStride = kNormSums * kNormTile;
  for (int64_t part = 0; part < std::min(kStride, numel); part += kNormTile) {
    work->squares.fill(0);
    work->zeros.fill(0);
    for (int64_t begin = part; begin < numel; begin += kStride) {
      add_tile(src + begin, std::min(kNormTile, numel - begin), work->squares, work->zeros);
    }
    const size_t index = static_cast<size_t>(part / kNormTile);
    work->all_squares[index] = collapse(work->squares);
    work->all_zeros[index] = collapse(work->zeros);
  }
  const Acc square = element::quiet(collapse(work->all_squares));
  return {static_cast<double>(square), collapse(work->all_zeros) == 0 ? 0.0 : 1.0};
}

template <typename Grad, typename Copy>
void adamw_all(const AdamWShard& shard, const AdamWFactors& factors) {
  const Grad* grad = static_cast<const Grad*>(shard.grad);
  Copy* copy = static_cast<Copy*>(shard.copy);
  for (int64_t i = 0; i < shard.numel; ++i) {
    const AdamWElement updated = adamw_step({shard.param[i], shard.exp_avg[i], shard.exp_avg_sq[i]},
                                            widen<float>(grad[i]), factors);
    shard.param[i] = updated.param;
    shard.exp_avg[i] = updated.exp_avg;
    shard.exp_avg_sq[i] = updated.exp_avg_sq;
    if (copy != nullptr) copy[i] = narrow<Copy>(updated.param);
  }
}

template <typename Grad>
void adamw_of(const AdamWShard& shard, const AdamWFactors& factors) {
  if (shard.copy_dtype == DType::kFloat16) {
    adamw_all<Grad, Float16>(shard, factors);
  } else {
    adamw_all<Grad, BFloat16>(shard, factors);
  }
}

void check_pointer(const char* operation, const char* what, const void* data, DType dtype) {
  check(data != nullptr, operation, ": ", what, " is a null pointer");
  check(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(itemsize(dtype)) == 0, operation,
        ": ", what, " is not aligned to the ", itemsize(dtype), " bytes of ", name(dtype));
}

}  // namespace

void check_norm(const char* operation, const void* src, DType dtype, int64_t numel) {
  check(dtype <= DType::kBFloat16, operation, ": ", name(dtype),
        " has no norm here; use float32, float64, float16 or bfloat16");
  check(numel >= 0, operation, ": numel is ", numel);
  if (numel > 0) check_pointer(operation, "the source", src, dtype);
}

void check_adamw(const char* operation, const AdamWShard& shard, const AdamWOptions& options) {
  check(shard.grad_dtype == DType::kFloat32 || shard.grad_dtype == DType::kFloat16 ||
            shard.grad_dtype == DType::kBFloat16,
        operation, ": the gradient is ", name(shard.grad_dtype),
        "; it must be float32, float16 or bfloat16");
  check(shard.copy == nullptr || shard.copy_dtype == DType::kFloat16 ||
            shard.copy_dtype == DType::kBFloat16,
        operation, ": the copy is ", name(shard.copy_dtype), "; it must be float16 or bfloat16");
  check(options.step >= 1, operation, ": step is ", options.step, "; the first update is step 1");
  check(shard.numel >= 0, operation, ": numel is ", shard.numel);
  if (shard.numel == 0) return;
  check_pointer(operation, "the parameter", shard.param, DType::kFloat32);
  check_pointer(operation, "exp_avg", shard.exp_avg, DType::kFloat32);
  check_pointer(operation, "exp_avg_sq", shard.exp_avg_sq, DType::kFloat32);
  check_pointer(operation, "the gradient", shard.grad, shard.grad_dtype);
  if (shard.copy != nullptr) check_pointer(operation, "the copy", shard.copy, shard.copy_dtype);
}

NormAndCheck norm_and_check(const void* src, DType dtype, int64_t numel) {
  check_norm("norm_and_check", src, dtype, numel);
  const FloatEnvironment environment;
  switch (dtype) {
    case DType::kFloat32:
      return norm_of(static_cast<const float*>(src), numel);
    case DType::kFloat64:
      return norm_of(static_cast<const double*>(src), numel);
    case DType::kFloat16:
      return norm_of(static_cast<const Float16*>(src), numel);
    default:
      return norm_of(static_cast<const BFloat16*>(src), numel);
  }
}

void adamw(const AdamWShard& shard, const AdamWOptions& options) {
  check_adamw("adamw", shard, options);
  const FloatEnvironment environment;
  const AdamWFactors factors = factors_of(options);
  switch (shard.grad_dtype) {
    case DType::kFloat32:
      return adamw_of<float>(shard, factors);
    case DType::kFloat16:
      return adamw_of<Float16>(shard, factors);
    default:
      return adamw_of<BFloat16>(shard, factors);
  }
}

}  // namespace fsdpx
