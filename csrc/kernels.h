// Passes over flat buffers: each reads and writes memory once. The loops are compiled for several
// instruction sets and chosen at run time; all choices give the same bits.
//
// Arithmetic: values are widened to the accumulation type (fp32; fp64 when either side is fp64),
// multiplied by `scale`, added to the widened old value when `accumulate`, and rounded once to
// nearest even. No fused multiply-add. Same-dtype copies with scale 1 and no accumulation are
// bit-exact (NaN payloads and subnormals included). kBits* types only copy: other requests throw
// InvalidArgument. Pointers need the alignment of their element only. Source and destination must
// not overlap.
#pragma once

#include <cstdint>
#include <span>

#include "dtype.h"

namespace fsdpx {

// A tensor's place in a flat buffer: `numel` contiguous elements at `data` stand for flat elements
// [offset, offset + numel). A null `data` stands for zeros.
struct ConstSpan {
  const void* data;
  int64_t numel;
  int64_t offset;
};

struct Span {
  void* data;
  int64_t numel;
  int64_t offset;
};

// dst[i] = cast(scale * src[i]) (+ dst[i])
void cast(const void* src, DType from, void* dst, DType to, int64_t numel, double scale = 1.0,
          bool accumulate = false);

// dsts[k][i] = cast(src[i]) for all k; the source is read once.
void cast_to_all(const void* src, DType from, std::span<void* const> dsts, DType to, int64_t numel);

// flat[s.offset + i] = cast(scale * s.data[i]) (+ flat[...]). `srcs` ascend and do not overlap.
// Without `accumulate`, flat elements that no span covers become zero; with it they are left alone.
void pack(std::span<const ConstSpan> srcs, DType from, void* flat, DType to, int64_t flat_numel,
          double scale = 1.0, bool accumulate = false);

// s.data[i] = cast(scale * flat[s.offset + i]) (+ s.data[i])
void unpack(const void* flat, DType from, std::span<const Span> dsts, DType to, double scale = 1.0,
            bool accumulate = false);

// dst[i] = cast(scale * (srcs[0][i] + srcs[1][i] + ...)) (+ dst[i]), added in the order of `srcs`:
// every rank that adds the same pieces in rank order gets the same bits.
void reduce(std::span<const void* const> srcs, DType from, void* dst, DType to, int64_t numel,
            double scale = 1.0, bool accumulate = false);

// The instruction set in use: "avx512", "avx2" or "portable". `set_isa` chooses one that the
// machine has (tests compare them), "auto" the best.
const char* isa();
void set_isa(const char* name);

}  // namespace fsdpx
