// AdamW on a flat shard, in one pass over the state.
#include <cuda_runtime.h>

#include <limits>

#include "launch.h"
#include "shard_passes.h"
#include "vector.cuh"
#include "walk.cuh"

namespace fsdpx::cuda {
namespace {

template <typename Grad, typename Copy>
struct AdamW {
  static constexpr int kNumel = kVector<Grad, Copy>;
  static constexpr int kBatch = 1;  // a step reads four buffers
  static constexpr bool kVectors = true;
  struct State {
    Vector<float, kNumel> param, exp_avg, exp_avg_sq;
    Vector<Grad, kNumel> grad;
  };

  const AdamWShard& shard;
  const AdamWFactors& factors;

  __device__ __forceinline__ const Grad* grad() const {
    return static_cast<const Grad*>(shard.grad);
  }
  __device__ __forceinline__ Copy* copy() const { return static_cast<Copy*>(shard.copy); }

  __device__ __forceinline__ void load(int64_t i, State& state) const {
    state.param.load(shard.param + i);
    state.exp_avg.load(shard.exp_avg + i);
    state.exp_avg_sq.load(shard.exp_avg_sq + i);
    state.grad.load(grad() + i);
  }

  __device__ __forceinline__ void finish(int64_t i, State& state) const {
    Vector<Copy, kNumel> out;
#pragma unroll
    for (int j = 0; j < kNumel; ++j) {
      const AdamWElement updated = adamw_step(
          {state.param.elements[j], state.exp_avg.elements[j], state.exp_avg_sq.elements[j]},
          widen<float>(state.grad.elements[j]), factors);
      state.param.elements[j] = updated.param;
      state.exp_avg.elements[j] = updated.exp_avg;
      state.exp_avg_sq.elements[j] = updated.exp_avg_sq;
      out.elements[j] = narrow<Copy>(updated.param);
    }
    state.param.store(shard.param + i);
    state.exp_avg.store(shard.exp_avg + i);
    state.exp_avg_sq.store(shard.exp_avg_sq + i);
    if (copy() != nullptr) out.store(copy() + i);
  }

  __device__ __forceinline__ void single(int64_t i) const {
    const AdamWElement updated = adamw_step({shard.param[i], shard.exp_avg[i], shard.exp_avg_sq[i]},
                                            widen<float>(grad()[i]), factors);
    shard.param[i] = updated.param;
    shard.exp_avg[i] = updated.exp_avg;
    shard.exp_avg_sq[i] = updated.exp_avg_sq;
    if (copy() != nullptr) copy()[i] = narrow<Copy>(updated.param);
  }
};

template <typename Grad, typename Copy>
__global__ void __launch_bounds__(kNumThreads, 2)
    adamw_kernel(const __grid_constant__ AdamWShard shard,
                 const __grid_constant__ AdamWFactors factors, int head) {
  for_each(part_of(shard.numel, head, blockIdx.x), AdamW<Grad, Copy>{shard, factors});
}

int32_t head_of(const AdamWShard& shard) {
  const auto walk = [](const void* data, DType dtype) {
    return Walk{reinterpret_cast<uintptr_t>(data), itemsize(dtype)};
  };
  const auto copy = shard.copy == nullptr ? walk(shard.param, DType::kFloat32)
                                          : walk(shard.copy, shard.copy_dtype);
  return elements_to_alignment(
      {walk(shard.param, DType::kFloat32), walk(shard.exp_avg, DType::kFloat32),
       walk(shard.exp_avg_sq, DType::kFloat32), walk(shard.grad, shard.grad_dtype), copy},
      shard.numel);
}

}  // namespace

void adamw(const AdamWShard& shard, const AdamWOptions& options, void* stream) {
  check_adamw("CUDA adamw", shard, options);
  if (shard.numel == 0) return;
  const AdamWFactors factors = factors_of(options);
  const int32_t head = head_of(shard);
  const int64_t num_tiles = tiles_of(shard.numel, head);
  check(num_tiles <= std::numeric_limits<int32_t>::max(), "CUDA adamw: numel is ", shard.numel);
  const auto launch = [&](auto grad_tag, auto copy_tag) {
    adamw_kernel<typename decltype(grad_tag)::Type, typename decltype(copy_tag)::Type>
        <<<static_cast<unsigned>(num_tiles), kNumThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            shard, factors, head);
  };
  const auto with_copy = [&](auto grad_tag) {
    if (shard.copy_dtype == DType::kFloat16) {
      launch(grad_tag, Tag<Float16>{});
    } else {
      launch(grad_tag, Tag<BFloat16>{});
    }
  };
  switch (shard.grad_dtype) {
    case DType::kFloat32:
      with_copy(Tag<float>{});
      break;
    case DType::kFloat16:
      with_copy(Tag<Float16>{});
      break;
    default:
      with_copy(Tag<BFloat16>{});
  }
  check_launch("adamw");
}

}  // namespace fsdpx::cuda
