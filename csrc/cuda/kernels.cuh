// Device code of the passes. Tables of pointers travel as kernel arguments, so a launch needs no
// memory of its own.
#pragma once

#include <cstdint>

#include "../element.h"
#include "kernels.h"

namespace fsdpx::cuda {

constexpr int kNumThreads = 256;
constexpr int kVector = 8;                            // elements of one thread and step
constexpr int64_t kTile = 4 * kNumThreads * kVector;  // elements of one block
constexpr int kMaxPieces = 120;                       // the table stays below 4 KiB of arguments

struct PieceEntry {
  const void* src;
  void* dst;
  int64_t numel;
  uint32_t first_tile;
};

struct PieceTable {
  PieceEntry pieces[kMaxPieces];  // ascending first_tile, none empty
  int32_t num_pieces;
  double scale;
};

struct SumTable {
  const void* srcs[kMaxSources];
  void* dst;
  int64_t numel;
  int32_t num_srcs;
  int32_t aligned;  // 1 when all pointers are multiples of 16 bytes
  double scale;
};

static_assert(sizeof(PieceTable) <= 4096 && sizeof(SumTable) <= 4096);

// kVector elements, moved 16 bytes (or all of them) at a time.
template <typename T>
struct Vector {
  static constexpr int kNumWords = static_cast<int>(sizeof(T)) * kVector / 16;
  union {
    uint4 words[kNumWords];
    T elements[kVector];
  };

  __device__ __forceinline__ Vector() {}
  __device__ __forceinline__ void load(const T* src) {
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) words[i] = reinterpret_cast<const uint4*>(src)[i];
  }
  __device__ __forceinline__ void store(T* dst) const {
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) reinterpret_cast<uint4*>(dst)[i] = words[i];
  }
};

// Rounded on their own: never fused, whatever flags this is compiled with.
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }

// The last step of every pass.
template <typename To, bool kAdd, typename Acc>
__device__ __forceinline__ To finish(Acc value, Acc scale, To old) {
  value = multiply(value, scale);
  if constexpr (kAdd) value = add(value, widen<Acc>(old));
  return narrow<To>(value);
}

__device__ __forceinline__ bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// The piece that this block works on.
__device__ __forceinline__ int find_piece(const PieceTable& table) {
  int low = 0;
  int high = table.num_pieces;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.pieces[middle].first_tile <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls vector(i) for whole groups of kVector elements from i on, and single(i) for the others, in
// [0, count).
template <typename OnVector, typename OnSingle>
__device__ __forceinline__ void for_each(int count, bool aligned, OnVector vector,
                                         OnSingle single) {
  const int whole = aligned ? count / kVector * kVector : 0;
  for (int i = static_cast<int>(threadIdx.x) * kVector; i < whole; i += kNumThreads * kVector)
    vector(i);
  for (int i = whole + static_cast<int>(threadIdx.x); i < count; i += kNumThreads) single(i);
}

template <typename From, typename To, bool kAdd>
__global__ void __launch_bounds__(kNumThreads)
    convert_kernel(const __grid_constant__ PieceTable table) {
  using Acc = Accumulator<From, To>;
  const PieceEntry& piece = table.pieces[find_piece(table)];
  const int64_t begin = static_cast<int64_t>(blockIdx.x - piece.first_tile) * kTile;
  const int count = static_cast<int>(piece.numel - begin < kTile ? piece.numel - begin : kTile);
  To* dst = static_cast<To*>(piece.dst) + begin;
  if (piece.src == nullptr) {
    for (int i = threadIdx.x; i < count; i += kNumThreads) dst[i] = To{};
    return;
  }
  const From* src = static_cast<const From*>(piece.src) + begin;
  const Acc scale = static_cast<Acc>(table.scale);
  for_each(
      count, is_aligned(src) && is_aligned(dst),
      [&](int i) {
        Vector<From> in;
        Vector<To> out;
        in.load(src + i);
        if constexpr (kAdd) out.load(dst + i);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          out.elements[j] = finish<To, kAdd>(widen<Acc>(in.elements[j]), scale, out.elements[j]);
        }
        out.store(dst + i);
      },
      [&](int i) { dst[i] = finish<To, kAdd>(widen<Acc>(src[i]), scale, kAdd ? dst[i] : To{}); });
}

// Copies bits; `Unit` is as large as the elements, or half of 16 bytes.
template <typename Unit>
__global__ void __launch_bounds__(kNumThreads)
    copy_kernel(const __grid_constant__ PieceTable table) {
  const PieceEntry& piece = table.pieces[find_piece(table)];
  const int64_t begin = static_cast<int64_t>(blockIdx.x - piece.first_tile) * kTile;
  const int count = static_cast<int>(piece.numel - begin < kTile ? piece.numel - begin : kTile);
  Unit* dst = static_cast<Unit*>(piece.dst) + begin;
  if (piece.src == nullptr) {
    for (int i = threadIdx.x; i < count; i += kNumThreads) dst[i] = Unit{};
    return;
  }
  const Unit* src = static_cast<const Unit*>(piece.src) + begin;
  constexpr int kPerWord = static_cast<int>(16 / sizeof(Unit));
  const int num_words = is_aligned(src) && is_aligned(dst) ? count / kPerWord : 0;
  for (int i = threadIdx.x; i < num_words; i += kNumThreads) {
    reinterpret_cast<uint4*>(dst)[i] = reinterpret_cast<const uint4*>(src)[i];
  }
  for (int i = num_words * kPerWord + threadIdx.x; i < count; i += kNumThreads) dst[i] = src[i];
}

template <typename From, typename To, bool kAdd>
__global__ void __launch_bounds__(kNumThreads)
    reduce_kernel(const __grid_constant__ SumTable table) {
  using Acc = Accumulator<From, To>;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTile;
  const int count = static_cast<int>(table.numel - begin < kTile ? table.numel - begin : kTile);
  To* dst = static_cast<To*>(table.dst) + begin;
  const Acc scale = static_cast<Acc>(table.scale);
  for_each(
      count, table.aligned != 0,
      [&](int i) {
        Vector<From> in;
        in.load(static_cast<const From*>(table.srcs[0]) + begin + i);
        Acc sums[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) sums[j] = widen<Acc>(in.elements[j]);
#pragma unroll 4
        for (int k = 1; k < table.num_srcs; ++k) {
          in.load(static_cast<const From*>(table.srcs[k]) + begin + i);
#pragma unroll
          for (int j = 0; j < kVector; ++j) sums[j] = add(sums[j], widen<Acc>(in.elements[j]));
        }
        Vector<To> out;
        if constexpr (kAdd) out.load(dst + i);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          out.elements[j] = finish<To, kAdd>(sums[j], scale, out.elements[j]);
        }
        out.store(dst + i);
      },
      [&](int i) {
        Acc sum = widen<Acc>(static_cast<const From*>(table.srcs[0])[begin + i]);
        for (int k = 1; k < table.num_srcs; ++k) {
          sum = add(sum, widen<Acc>(static_cast<const From*>(table.srcs[k])[begin + i]));
        }
        dst[i] = finish<To, kAdd>(sum, scale, kAdd ? dst[i] : To{});
      });
}

}  // namespace fsdpx::cuda
