// How a block walks over its part of a buffer: in vectors where all pointers are aligned.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch.h"
#include "vector.cuh"

namespace fsdpx::cuda {

// A block's part of a piece: `count` elements from `begin` on, after `head` ones that are not
// aligned (in the first tile; they lie before `begin`).
struct Part {
  int64_t begin;
  int count;
  int head;
  bool vectors;
};

__device__ __forceinline__ Part part_of(int64_t numel, int head, uint32_t tile) {
  const int first = head > 0 ? head : 0;
  const int64_t begin = first + static_cast<int64_t>(tile) * kTile;
  const int64_t left = numel - begin;
  return {begin, static_cast<int>(left < kTile ? left : kTile), tile == 0 ? first : 0,
          head != kNoVectors};
}

// Walks over a part: whole warps' worth of kNumel elements per thread by body.load(i, state) and
// body.finish(i, state), with the index of the warp's first element; all others by body.single(i).
// Some vectors are loaded before the first is finished, to keep enough reads under way.
template <typename Body>
__device__ __forceinline__ void for_each(const Part& part, const Body& body) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < part.head) body.single(thread);
  int whole = 0;
  if constexpr (Body::kVectors) {
    constexpr int kPerWarp = kWarp * Body::kNumel;
    constexpr int kStep = kNumThreads * Body::kNumel;
    if (part.vectors) whole = part.count / kPerWarp * kPerWarp;
#pragma unroll 1
    for (int first = thread / kWarp * kPerWarp; first < whole; first += Body::kBatch * kStep) {
      typename Body::State states[Body::kBatch];
#pragma unroll
      for (int k = 0; k < Body::kBatch; ++k) {
        if (first + k * kStep < whole) body.load(part.begin + first + k * kStep, states[k]);
      }
#pragma unroll
      for (int k = 0; k < Body::kBatch; ++k) {
        if (first + k * kStep < whole) body.finish(part.begin + first + k * kStep, states[k]);
      }
    }
  }
#pragma unroll 1
  for (int i = whole + thread; i < part.count; i += kNumThreads) body.single(part.begin + i);
}

}  // namespace fsdpx::cuda
