// The passes of kernels.h on a GPU, enqueued on a stream. The host side of these functions never
// waits, allocates nothing and keeps no reference to its arguments; the memory that they point to
// must stay alive until the stream has passed. Same arithmetic and same bits as on the CPU. They
// throw InvalidArgument, or std::runtime_error when a launch fails. `stream` is a cudaStream_t.
#pragma once

#include <cstdint>
#include <limits>
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
// pieces. They must not overlap.
void convert(std::span<const Piece> pieces, DType from, DType to, double scale, bool accumulate,
             void* stream);

// A launch takes as many blocks as there are tiles, or at most `max_blocks`, which then go through
// the tiles: what waits for a link needs few, and what computes beside it wants the others.
inline constexpr int kNoLimit = std::numeric_limits<int>::max();

// A piece for several peers: it goes `offset` bytes into the memory of each.
struct GatherPiece {
  const void* src;
  int64_t numel;
  int64_t offset;
};

// dst[i] = cast(src[i]) in all pieces, for the memory of every peer: the source is read once, and
// cast once. `peers` are written in this order by every thread, so let each rank begin with another
// one. More than kMaxPeers take several launches.
inline constexpr int kMaxPeers = 32;
void gather(std::span<const GatherPiece> pieces, std::span<void* const> peers, DType from, DType to,
            void* stream, int max_blocks = kNoLimit);

// dst[i] = cast(scale * (srcs[0][i] + srcs[1][i] + ...)) (+ dst[i]), added in the order of `srcs`,
// at most kMaxSources. Sources may be memory of peers.
inline constexpr int kMaxSources = 128;
void reduce(std::span<const void* const> srcs, DType from, void* dst, DType to, int64_t numel,
            double scale, bool accumulate, void* stream, int max_blocks = kNoLimit);

}  // namespace fsdpx::cuda
