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

// The piece that a tile belongs to.
__device__ __forceinline__ const PieceEntry& find_piece(const PieceTable& table, uint32_t tile) {
  int low = 0;
  int high = table.num_pieces;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.pieces[middle].first_tile <= tile) {
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

// Vectors that a thread has under way: two, or one where two would not fit its registers.
template <typename From, typename To>
inline constexpr int kBatchOf = sizeof(From) < 8 && sizeof(To) * kVector<From, To> <= 32 ? 2 : 1;

// dst[i] = cast(scale * src[i]) (+ dst[i]) in a piece, for all bases. Unsigned types stand for bits
// that are copied.
template <typename From, typename To>
struct Convert {
  static constexpr int kNumel = kVector<From, To>;
  static constexpr int kBatch = kBatchOf<From, To>;
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
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < table.num_tiles; tile += gridDim.x) {
    const PieceEntry& piece = find_piece(table, tile);
    const Part part = part_of(piece.numel, piece.head, tile - piece.first_tile);
    for_each(part, Convert<From, To>{table, piece});
  }
}

// dst[i] = cast(scale * (srcs[0][i] + srcs[1][i] + ...)) (+ dst[i]), added in the order of srcs.
template <typename From, typename To>
struct Reduce {
  static constexpr int kNumel = kVector<From, To>;
  static constexpr int kBatch = kBatchOf<From, To>;
  static constexpr bool kVectors = sizeof(To) > 1 && Convert<From, To>::kVectors;
  using Acc = Accumulator<From, To>;
  using In = Vector<From, kNumel>;
  // Sources that are read before the first is added: a peer's memory is microseconds away.
  static constexpr int kAhead = In::kNumWords < 4 ? 4 / In::kNumWords : 1;
  struct State {
    In in[kAhead];
    Vector<To, kNumel> old;
  };

  const SumTable& table;

  __device__ __forceinline__ const From* src(int k) const {
    return static_cast<const From*>(table.srcs[k]);
  }
  __device__ __forceinline__ To* dst() const { return static_cast<To*>(table.dst); }
  __device__ __forceinline__ bool accumulates() const { return table.accumulate != 0; }

  // Sources from `begin` on, as many as there are.
  __device__ __forceinline__ void read(int64_t i, int begin, In (&in)[kAhead]) const {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (begin + k < table.num_srcs) in[k].load(src(begin + k) + i);
    }
  }

  __device__ __forceinline__ void add_all(int begin, const In (&in)[kAhead],
                                          Acc (&sums)[kNumel]) const {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (begin + k >= table.num_srcs) break;
#pragma unroll
      for (int j = 0; j < kNumel; ++j) {
        const Acc value = widen<Acc>(in[k].elements[j]);
        sums[j] = begin + k == 0 ? value : add(sums[j], value);
      }
    }
  }

  __device__ __forceinline__ void load(int64_t i, State& state) const {
    if (accumulates()) state.old.load(dst() + i);
    read(i, 0, state.in);
  }

  __device__ __forceinline__ void finish(int64_t i, const State& state) const {
    Acc sums[kNumel];
    add_all(0, state.in, sums);
#pragma unroll 1
    for (int begin = kAhead; begin < table.num_srcs; begin += kAhead) {
      In in[kAhead];
      read(i, begin, in);
      add_all(begin, in, sums);
    }
    Vector<To, kNumel> out;
#pragma unroll
    for (int j = 0; j < kNumel; ++j) {
      out.elements[j] = finished<To>(sums[j], table.scale, accumulates(), state.old.elements[j]);
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
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < table.num_tiles; tile += gridDim.x) {
    for_each(part_of(table.numel, table.head, tile), Reduce<From, To>{table});
  }
}

// ---- Launches, each instantiated in one of passes_*.cu.

template <typename To>
void launch_convert(const PieceTable& table, DType from, const Launch& launch) {
  with_floating(from, [&](auto tag) {
    using From = typename decltype(tag)::Type;
    const unsigned blocks = launch.blocks(table.num_tiles);
    convert_kernel<From, To><<<blocks, kNumThreads, 0, launch.stream>>>(table);
  });
  check_launch("convert");
}

template <typename To>
void launch_reduce(const SumTable& table, DType from, const Launch& launch) {
  with_floating(from, [&](auto tag) {
    using From = typename decltype(tag)::Type;
    const unsigned blocks = launch.blocks(table.num_tiles);
    reduce_kernel<From, To><<<blocks, kNumThreads, 0, launch.stream>>>(table);
  });
  check_launch("reduce");
}

}  // namespace fsdpx::cuda
