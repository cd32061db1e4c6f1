// The passes of kernels.h on a GPU, enqueued on a stream. The host side of these functions never
// waits and keeps no reference to its arguments; the memory that they point to must stay alive
// until the stream has passed. Same arithmetic and same bits as on the CPU.
#pragma once

#include <cstdint>
#include <span>

#include "../dtype.h"

namespace fsdpx::cuda {

// `numel` contiguous elements from `src` to `dst`; a null `src` stands for zeros.
struct Piece {
  const void* src;
  void* dst;
  int64_t numel;
};

// dst[i] = cast(scale * src[i]) (+ dst[i]) in all pieces: pack, unpack and cast are lists of
// pieces. They must not overlap. `stream` is a cudaStream_t. Throws InvalidArgument, or
// std::runtime_error when a launch fails.
void convert(std::span<const Piece> pieces, DType from, DType to, double scale, bool accumulate,
             void* stream);

// dst[i] = cast(scale * (srcs[0][i] + srcs[1][i] + ...)) (+ dst[i]), added in the order of `srcs`,
// at most kMaxSources.
inline constexpr int kMaxSources = 128;
void reduce(std::span<const void* const> srcs, DType from, void* dst, DType to, int64_t numel,
            double scale, bool accumulate, void* stream);

}  // namespace fsdpx::cuda
