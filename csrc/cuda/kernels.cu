// Fills the tables of the passes and launches them.
#include <limits>

#include "kernels.h"
#include "launch.h"
#include "passes.h"

namespace fsdpx::cuda {
namespace {

constexpr int64_t kMaxTiles = std::numeric_limits<int32_t>::max();

// Fills tables with pieces and launches each when it is full.
class Pieces {
 public:
  Pieces(const char* operation, DType from, DType to, double scale, bool accumulate, void* stream,
         int max_blocks = kNoLimit)
      : operation_(operation),
        from_(from),
        to_(to),
        copies_(from == to && scale == 1.0 && !accumulate),
        // The largest copies are moved as two units each.
        units_(copies_ && itemsize(to) == 16 ? 2 : 1),
        launch_{static_cast<cudaStream_t>(stream), max_blocks} {
    check(copies_ || (is_floating(from) && is_floating(to)), "CUDA ", operation, ": ", name(from),
          " to ", name(to), " with scale ", scale, accumulate ? " and accumulation" : "",
          " is not supported; other than floating types can only be copied as they are");
    table_.scale = scale;
    table_.accumulate = accumulate ? 1 : 0;
    table_.num_pieces = 0;
    table_.num_bases = 1;
    table_.bases[0] = nullptr;
  }

  // All pieces that follow go to these.
  void set_bases(std::span<void* const> bases) {
    flush();
    table_.num_bases = static_cast<int32_t>(bases.size());
    for (size_t k = 0; k < bases.size(); ++k) table_.bases[k] = static_cast<char*>(bases[k]);
  }

  void check_piece(size_t index, const void* src, uintptr_t dst, int64_t numel) const {
    check(numel >= 0, "CUDA ", operation_, ": piece ", index, " has numel ", numel);
    check(numel == 0 || dst != 0, "CUDA ", operation_, ": piece ", index, " has no destination");
    check(is_element_aligned(src, from_) &&
              is_element_aligned(reinterpret_cast<const void*>(dst), to_),
          "CUDA ", operation_, ": piece ", index, " (", name(from_), " to ", name(to_),
          ") is not aligned to its elements; copy it to aligned memory first");
  }

  void add(const void* src, int64_t dst, int64_t numel) {
    if (numel == 0 || (src == nullptr && table_.accumulate != 0)) return;
    numel *= units_;
    const int32_t head = head_of(src, dst, numel);
    const int64_t tiles = tiles_of(numel, head);
    check(tiles <= kMaxTiles, "CUDA ", operation_, ": a piece of ", numel,
          " elements is too large");
    if (table_.num_pieces == kMaxPieces || num_tiles_ + tiles > kMaxTiles) flush();
    table_.pieces[table_.num_pieces++] = {src, dst, numel, static_cast<uint32_t>(num_tiles_), head};
    num_tiles_ += tiles;
  }

  void flush() {
    if (table_.num_pieces == 0) return;
    table_.num_tiles = static_cast<uint32_t>(num_tiles_);
    launch();
    table_.num_pieces = 0;
    num_tiles_ = 0;
  }

 private:
  int32_t head_of(const void* src, int64_t dst, int64_t numel) const {
    const uintptr_t first = reinterpret_cast<uintptr_t>(table_.bases[0]);
    uintptr_t differ = 0;
    for (int k = 1; k < table_.num_bases; ++k) {
      differ |= first ^ reinterpret_cast<uintptr_t>(table_.bases[k]);
    }
    if (differ % 16 != 0) return kNoVectors;
    const Walk target{first + static_cast<uintptr_t>(dst), itemsize(to_) / units_};
    if (src == nullptr) return elements_to_alignment({target}, numel);
    const Walk source{reinterpret_cast<uintptr_t>(src), itemsize(from_) / units_};
    return elements_to_alignment({source, target}, numel);
  }

  void launch() {
    if (copies_) return launch_copy(table_, itemsize(to_) / units_, launch_);
    with_floating(to_, [&](auto tag) {
      launch_convert<typename decltype(tag)::Type>(table_, from_, launch_);
    });
  }

  const char* operation_;
  DType from_;
  DType to_;
  bool copies_;
  int64_t units_;
  Launch launch_;
  PieceTable table_;
  int64_t num_tiles_ = 0;
};

}  // namespace

void convert(std::span<const Piece> pieces, DType from, DType to, double scale, bool accumulate,
             void* stream) {
  Pieces table("convert", from, to, scale, accumulate, stream);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    table.check_piece(i, piece.src, reinterpret_cast<uintptr_t>(piece.dst), piece.numel);
  }
  for (const Piece& piece : pieces) {
    table.add(piece.src, static_cast<int64_t>(reinterpret_cast<uintptr_t>(piece.dst)), piece.numel);
  }
  table.flush();
}

void gather(std::span<const GatherPiece> pieces, std::span<void* const> peers, DType from, DType to,
            void* stream, int max_blocks) {
  Pieces table("gather", from, to, 1.0, false, stream, max_blocks);
  for (void* peer : peers) {
    for (size_t i = 0; i < pieces.size(); ++i) {
      const GatherPiece& piece = pieces[i];
      check(peer != nullptr && piece.offset >= 0, "CUDA gather: a peer is null, or piece ", i,
            " has the offset ", piece.offset);
      const uintptr_t dst =
          reinterpret_cast<uintptr_t>(peer) + static_cast<uintptr_t>(piece.offset);
      table.check_piece(i, piece.src, dst, piece.numel);
    }
  }
  for (size_t begin = 0; begin < peers.size(); begin += kMaxPeers) {
    table.set_bases(peers.subspan(begin, std::min<size_t>(kMaxPeers, peers.size() - begin)));
    for (const GatherPiece& piece : pieces) table.add(piece.src, piece.offset, piece.numel);
  }
  table.flush();
}

void reduce(std::span<const void* const> srcs, DType from, void* dst, DType to, int64_t numel,
            double scale, bool accumulate, void* stream, int max_blocks) {
  check(!srcs.empty() && srcs.size() <= kMaxSources, "CUDA reduce: ", srcs.size(),
        " sources; give 1 to ", kMaxSources);
  check(numel >= 0 && numel <= kMaxTiles * kTile, "CUDA reduce: numel is ", numel);
  if (srcs.size() == 1 && srcs[0] != nullptr) {  // which may be a copy of bits
    const Piece piece{srcs[0], dst, numel};
    return convert({&piece, 1}, from, to, scale, accumulate, stream);
  }
  if (numel == 0) return;
  SumTable table;
  const uintptr_t first = reinterpret_cast<uintptr_t>(srcs[0]);
  uintptr_t differ = 0;
  for (size_t k = 0; k < srcs.size(); ++k) {
    check(srcs[k] != nullptr && is_element_aligned(srcs[k], from), "CUDA reduce: source ", k,
          " is null or not aligned to ", name(from));
    table.srcs[k] = srcs[k];
    differ |= first ^ reinterpret_cast<uintptr_t>(srcs[k]);
  }
  check(dst != nullptr && is_element_aligned(dst, to),
        "CUDA reduce: the destination is null or not aligned to ", name(to));
  table.dst = dst;
  table.numel = numel;
  table.num_srcs = static_cast<int32_t>(srcs.size());
  table.scale = scale;
  table.accumulate = accumulate ? 1 : 0;
  const Walk source{first, itemsize(from)};
  const Walk target{reinterpret_cast<uintptr_t>(dst), itemsize(to)};
  table.head = differ % 16 != 0 ? kNoVectors : elements_to_alignment({source, target}, numel);
  table.num_tiles = static_cast<uint32_t>(tiles_of(numel, table.head));
  const Launch launch{static_cast<cudaStream_t>(stream), max_blocks};
  with_floating(
      to, [&](auto tag) { launch_reduce<typename decltype(tag)::Type>(table, from, launch); });
}

}  // namespace fsdpx::cuda
