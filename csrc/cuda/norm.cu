// The squared norm of a flat shard, in two launches: sums of tiles, and their sum.
#include <cuda_runtime.h>

#include <algorithm>

#include "launch.h"
#include "shard_passes.h"
#include "vector.cuh"

namespace fsdpx::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kOwn = static_cast<int>(kNormSums) / kThreads;  // sums of one thread, neighbours
constexpr int kNumWarps = kThreads / kWarp;

template <typename Acc>
struct Sums {
  Acc squares[kOwn];
  Acc zeros[kOwn];
};

// Adds neighbours until one number is left, which the first thread of the block gets.
template <typename Acc>
__device__ Acc collapse(Acc (&sums)[kOwn], Acc* of_warps) {
#pragma unroll
  for (int left = kOwn / 2; left >= 1; left /= 2) {
#pragma unroll
    for (int i = 0; i < left; ++i) sums[i] = add(sums[2 * i], sums[2 * i + 1]);
  }
  Acc sum = sums[0];
#pragma unroll
  for (int apart = 1; apart < kWarp; apart *= 2) {
    sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, apart));
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (threadIdx.x % kWarp == 0) of_warps[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    Acc all[kNumWarps];
#pragma unroll
    for (int i = 0; i < kNumWarps; ++i) all[i] = of_warps[i];
#pragma unroll
    for (int left = kNumWarps / 2; left >= 1; left /= 2) {
#pragma unroll
      for (int i = 0; i < left; ++i) all[i] = add(all[2 * i], all[2 * i + 1]);
    }
    sum = all[0];
  }
  return sum;
}

// The elements that belong to this thread's sums, kOwn from `begin` of the warp's on; zeros beyond
// the end.
template <typename T>
__device__ __forceinline__ void read(const T* src, int64_t numel, int64_t begin, bool aligned,
                                     Vector<T, kOwn>& in) {
  if (aligned && begin + kWarp * kOwn <= numel) {
    in.load(src + begin);
    return;
  }
  const int64_t first = begin + static_cast<int64_t>(threadIdx.x % kWarp) * kOwn;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) in.elements[i] = first + i < numel ? src[first + i] : T{};
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    norm_kernel(const T* src, int64_t numel, Accumulator<T, float>* partial) {
  using Acc = Accumulator<T, float>;
  __shared__ Acc of_warps[2][kNumWarps];
  Sums<Acc> sums{};
  const bool aligned = reinterpret_cast<uintptr_t>(src) % 16 == 0;
  const int64_t warp_begin = static_cast<int64_t>(threadIdx.x) / kWarp * (kWarp * kOwn);
#pragma unroll 1
  for (int64_t tile = blockIdx.x * kNormTile; tile < numel; tile += kNormSums * kNormTile) {
#pragma unroll 2
    for (int64_t row = tile; row < tile + kNormTile; row += kNormSums) {
      Vector<T, kOwn> in;
      read(src, numel, row + warp_begin, aligned, in);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const Acc value = widen<Acc>(in.elements[i]);
        sums.squares[i] = add(sums.squares[i], multiply(value, value));
        sums.zeros[i] = add(sums.zeros[i], multiply(value, Acc{0}));
      }
    }
  }
  const Acc square = collapse(sums.squares, of_warps[0]);
  const Acc zero = collapse(sums.zeros, of_warps[1]);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = square;
    partial[kNormSums + blockIdx.x] = zero;
  }
}

template <typename Acc>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const Acc* partial, int num_partials, Acc* out) {
  __shared__ Acc of_warps[2][kNumWarps];
  Sums<Acc> sums;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int index = static_cast<int>(threadIdx.x) * kOwn + i;
    sums.squares[i] = index < num_partials ? partial[index] : Acc{0};
    sums.zeros[i] = index < num_partials ? partial[kNormSums + index] : Acc{0};
  }
  const Acc square = collapse(sums.squares, of_warps[0]);
  const Acc zero = collapse(sums.zeros, of_warps[1]);
  if (threadIdx.x == 0) {
    out[0] = element::quiet(square);
    out[1] = zero == 0 ? Acc{0} : Acc{1};
  }
}

template <typename T>
void launch(const void* src, int64_t numel, void* workspace, void* out, cudaStream_t stream) {
  using Acc = Accumulator<T, float>;
  Acc* const partial = static_cast<Acc*>(workspace);
  const int64_t tiles = (numel + kNormTile - 1) / kNormTile;
  const int num_partials = static_cast<int>(std::min(tiles, kNormSums));
  if (num_partials > 0) {
    norm_kernel<<<static_cast<unsigned>(num_partials), kThreads, 0, stream>>>(
        static_cast<const T*>(src), numel, partial);
    check_launch("norm");
  }
  sum_kernel<<<1, kThreads, 0, stream>>>(partial, num_partials, static_cast<Acc*>(out));
  check_launch("norm");
}

}  // namespace

void norm_and_check(const void* src, DType dtype, int64_t numel, void* workspace, void* out,
                    void* stream) {
  check_norm("CUDA norm", src, dtype, numel);
  check(workspace != nullptr && out != nullptr, "CUDA norm: workspace or result is a null pointer");
  const auto to = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case DType::kFloat32:
      return launch<float>(src, numel, workspace, out, to);
    case DType::kFloat64:
      return launch<double>(src, numel, workspace, out, to);
    case DType::kFloat16:
      return launch<Float16>(src, numel, workspace, out, to);
    default:
      return launch<BFloat16>(src, numel, workspace, out, to);
  }
}

}  // namespace fsdpx::cuda
