// Device code of the passes over flat buffers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../element.h"
#include "launch.h"
#include "passes.h"
#include "vector.cuh"
#include "walk.cuh"

namespace fsdpx::cuda {

// The piece that this block works on.
__device__ __forceinline__ const PieceEntry& find_piece(const PieceTable& table) {
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
  return table.pieces[low];
}

// The last step of every pass: cast(scale * value) (+ old).
template <typename To, typename Acc>
__device__ __forceinline__ To finished(Acc value, double scale, bool accumulate, To old) {
  value = multiply(value, static_cast<Acc>(scale));
  if (accumulate) value = add(value, widen<Acc>(old));
  return narrow<To>(value);
}

// dst[i] = cast(scale * src[i]) (+ dst[i]) in a piece, for all bases. Unsigned types stand for bits
// that are copied.
template <typename From, typename To>
struct Convert {
  static constexpr int kNumel = kVector<From, To>;
  static constexpr int kBatch = 2;
  // Doubles to and from eighths go element by element: nobody moves many, and their code is long.
  static constexpr bool kVectors = kNumel < 16 || (sizeof(From) < 8 && sizeof(To) < 8);
  struct State {
    Vector<From, kNumel> in;
    Vector<To, kNumel> old;
  };

  const PieceTable& table;
  const PieceEntry& piece;

  __device__ __forceinline__ const From* src() const { return static_cast<const From*>(piece.src); }
  __device__ __forceinline__ To* dst(int base) const {
    return reinterpret_cast<To*>(table.bases[base] + piece.dst);
  }
  __device__ __forceinline__ bool accumulates() const { return table.accumulate != 0; }

  __device__ __forceinline__ To value(From in, To old) const {
    if constexpr (std::is_unsigned_v<From>) {
      return in;
    } else {
      return finished<To>(widen<Accumulator<From, To>>(in), table.scale, accumulates(), old);
    }
  }

  __device__ __forceinline__ void load(int64_t i, State& state) const {
    if (src() != nullptr) state.in.load(src() + i);
    if (accumulates()) state.old.load(dst(0) + i);
  }

  __device__ __forceinline__ void finish(int64_t i, const State& state) const {
    Vector<To, kNumel> out;
#pragma unroll
    for (int j = 0; j < kNumel; ++j) {
      out.elements[j] =
          src() == nullptr ? To{} : value(state.in.elements[j], state.old.elements[j]);
    }
    const auto words = out.arranged();
#pragma unroll 1
    for (int base = 0; base < table.num_bases; ++base) words.store(dst(base) + i);
  }

  __device__ __forceinline__ void single(int64_t i) const {
    const To out = src() == nullptr ? To{} : value(src()[i], accumulates() ? dst(0)[i] : To{});
#pragma unroll 1
    for (int base = 0; base < table.num_bases; ++base) dst(base)[i] = out;
  }
};

template <typename From, typename To>
__global__ void __launch_bounds__(kNumThreads)
    convert_kernel(const __grid_constant__ PieceTable table) {
  const PieceEntry& piece = find_piece(table);
  const Part part = part_of(piece.numel, piece.head, blockIdx.x - piece.first_tile);
  for_each(part, Convert<From, To>{table, piece});
}

// dst[i] = cast(scale * (srcs[0][i] + srcs[1][i] + ...)) (+ dst[i]), added in the order of srcs.
template <typename From, typename To>
struct Reduce {
  static constexpr int kNumel = kVector<From, To>;
  static constexpr int kBatch = 1;  // there are several sources
  static constexpr bool kVectors = sizeof(To) > 1 && Convert<From, To>::kVectors;
  using Acc = Accumulator<From, To>;
  struct State {
    Acc sums[kNumel];
    Vector<To, kNumel> old;
  };

  const SumTable& table;

  __device__ __forceinline__ const From* src(int k) const {
    return static_cast<const From*>(table.srcs[k]);
  }
  __device__ __forceinline__ To* dst() const { return static_cast<To*>(table.dst); }
  __device__ __forceinline__ bool accumulates() const { return table.accumulate != 0; }

  __device__ __forceinline__ void load(int64_t i, State& state) const {
    if (accumulates()) state.old.load(dst() + i);
    Vector<From, kNumel> in;
    in.load(src(0) + i);
#pragma unroll
    for (int j = 0; j < kNumel; ++j) state.sums[j] = widen<Acc>(in.elements[j]);
#pragma unroll 4
    for (int k = 1; k < table.num_srcs; ++k) {
      in.load(src(k) + i);
#pragma unroll
      for (int j = 0; j < kNumel; ++j) {
        state.sums[j] = add(state.sums[j], widen<Acc>(in.elements[j]));
      }
    }
  }

  __device__ __forceinline__ void finish(int64_t i, const State& state) const {
    Vector<To, kNumel> out;
#pragma unroll
    for (int j = 0; j < kNumel; ++j) {
      out.elements[j] =
          finished<To>(state.sums[j], table.scale, accumulates(), state.old.elements[j]);
    }
    out.store(dst() + i);
  }

  __device__ __forceinline__ void single(int64_t i) const {
    Acc sum = widen<Acc>(src(0)[i]);
#pragma unroll 1
    for (int k = 1; k < table.num_srcs; ++k) sum = add(sum, widen<Acc>(src(k)[i]));
    dst()[i] = finished<To>(sum, table.scale, accumulates(), accumulates() ? dst()[i] : To{});
  }
};

template <typename From, typename To>
__global__ void __launch_bounds__(kNumThreads, 2)
    reduce_kernel(const __grid_constant__ SumTable table) {
  for_each(part_of(table.numel, table.head, blockIdx.x), Reduce<From, To>{table});
}

// ---- Launches, each instantiated in one of passes_*.cu.

template <typename To>
void launch_convert(const PieceTable& table, unsigned num_tiles, DType from, cudaStream_t stream) {
  with_floating(from, [&](auto tag) {
    using From = typename decltype(tag)::Type;
    convert_kernel<From, To><<<num_tiles, kNumThreads, 0, stream>>>(table);
  });
  check_launch("convert");
}

template <typename To>
void launch_reduce(const SumTable& table, unsigned num_tiles, DType from, cudaStream_t stream) {
  with_floating(from, [&](auto tag) {
    using From = typename decltype(tag)::Type;
    reduce_kernel<From, To><<<num_tiles, kNumThreads, 0, stream>>>(table);
  });
  check_launch("reduce");
}

}  // namespace fsdpx::cuda
