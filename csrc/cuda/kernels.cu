// Fills the tables of the passes and launches them.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../check.h"
#include "kernels.cuh"

namespace fsdpx::cuda {
namespace {

constexpr int64_t kMaxTiles = std::numeric_limits<int32_t>::max();

template <typename T>
struct Tag {
  using Type = T;
};

// Calls visit(Tag<T>{}) for the type that `dtype` stands for.
template <typename Visit>
void with_floating(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kFloat32:
      return visit(Tag<float>{});
    case DType::kFloat64:
      return visit(Tag<double>{});
    case DType::kFloat16:
      return visit(Tag<Float16>{});
    case DType::kBFloat16:
      return visit(Tag<BFloat16>{});
    default:
      check(false, "CUDA pass: ", name(dtype),
            " has no arithmetic; it can only be copied as it is");
  }
}

// Calls visit(Tag<From>{}, Tag<To>{}, std::bool_constant<kAdd>{}).
template <typename Visit>
void with_conversion(DType from, DType to, bool accumulate, const Visit& visit) {
  with_floating(from, [&](auto from_tag) {
    with_floating(to, [&](auto to_tag) {
      if (accumulate) {
        visit(from_tag, to_tag, std::true_type{});
      } else {
        visit(from_tag, to_tag, std::false_type{});
      }
    });
  });
}

template <typename Visit>
void with_unit(int64_t size, const Visit& visit) {
  switch (size) {
    case 1:
      return visit(Tag<uint8_t>{});
    case 2:
      return visit(Tag<uint16_t>{});
    case 4:
      return visit(Tag<uint32_t>{});
    default:
      return visit(Tag<uint64_t>{});
  }
}

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("fsdpx: the CUDA pass ") + what +
                             " could not be launched: " + cudaGetErrorString(error));
  }
}

bool is_element_aligned(const void* data, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % std::min<int64_t>(itemsize(dtype), 8) == 0;
}

void check_piece(size_t index, const Piece& piece, DType from, DType to) {
  check(piece.numel >= 0, "CUDA pass: piece ", index, " has numel ", piece.numel);
  check(piece.numel == 0 || piece.dst != nullptr, "CUDA pass: piece ", index,
        " has no destination");
  check(is_element_aligned(piece.src, from) && is_element_aligned(piece.dst, to),
        "CUDA pass: piece ", index, " (", name(from), " to ", name(to),
        ") is not aligned to its elements; copy it to aligned memory first");
}

void launch_convert(const PieceTable& table, unsigned num_tiles, DType from, DType to, bool copies,
                    bool accumulate, cudaStream_t stream) {
  if (copies) {
    with_unit(itemsize(to), [&](auto unit) {
      copy_kernel<typename decltype(unit)::Type><<<num_tiles, kNumThreads, 0, stream>>>(table);
    });
  } else {
    with_conversion(from, to, accumulate, [&](auto from_tag, auto to_tag, auto add_tag) {
      convert_kernel<typename decltype(from_tag)::Type, typename decltype(to_tag)::Type,
                     decltype(add_tag)::value><<<num_tiles, kNumThreads, 0, stream>>>(table);
    });
  }
  check_launch("convert");
}

}  // namespace

void convert(std::span<const Piece> pieces, DType from, DType to, double scale, bool accumulate,
             void* stream) {
  const bool copies = from == to && scale == 1.0 && !accumulate;
  check(copies || (is_floating(from) && is_floating(to)), "CUDA pass: ", name(from), " to ",
        name(to), " with scale ", scale, accumulate ? " and accumulation" : "",
        " is not supported; other than floating types can only be copied as they are");
  for (size_t i = 0; i < pieces.size(); ++i) check_piece(i, pieces[i], from, to);
  // The largest copies are moved as two units each.
  const int64_t units = copies && itemsize(to) == 16 ? 2 : 1;
  PieceTable table;
  table.scale = scale;
  table.num_pieces = 0;
  int64_t num_tiles = 0;
  const auto flush = [&] {
    if (table.num_pieces == 0) return;
    launch_convert(table, static_cast<unsigned>(num_tiles), from, to, copies, accumulate,
                   static_cast<cudaStream_t>(stream));
    table.num_pieces = 0;
    num_tiles = 0;
  };
  for (const Piece& piece : pieces) {
    if (piece.numel == 0 || (piece.src == nullptr && accumulate)) continue;
    const int64_t numel = piece.numel * units;
    const int64_t tiles = (numel + kTile - 1) / kTile;
    check(tiles <= kMaxTiles, "CUDA pass: a piece of ", piece.numel, " elements is too large");
    if (table.num_pieces == kMaxPieces || num_tiles + tiles > kMaxTiles) flush();
    table.pieces[table.num_pieces++] = {piece.src, piece.dst, numel,
                                        static_cast<uint32_t>(num_tiles)};
    num_tiles += tiles;
  }
  flush();
}

void reduce(std::span<const void* const> srcs, DType from, void* dst, DType to, int64_t numel,
            double scale, bool accumulate, void* stream) {
  check(!srcs.empty() && srcs.size() <= kMaxSources, "CUDA reduce: ", srcs.size(),
        " sources; give 1 to ", kMaxSources);
  check(numel >= 0 && numel <= kMaxTiles * kTile, "CUDA reduce: numel is ", numel);
  if (srcs.size() == 1 && srcs[0] != nullptr) {  // which may be a copy of bits
    const Piece piece{srcs[0], dst, numel};
    return convert({&piece, 1}, from, to, scale, accumulate, stream);
  }
  if (numel == 0) return;
  SumTable table;
  uintptr_t all = reinterpret_cast<uintptr_t>(dst);
  for (size_t k = 0; k < srcs.size(); ++k) {
    check(srcs[k] != nullptr && is_element_aligned(srcs[k], from), "CUDA reduce: source ", k,
          " is null or not aligned to ", name(from));
    table.srcs[k] = srcs[k];
    all |= reinterpret_cast<uintptr_t>(srcs[k]);
  }
  check(dst != nullptr && is_element_aligned(dst, to),
        "CUDA reduce: the destination is null or not aligned to ", name(to));
  table.dst = dst;
  table.numel = numel;
  table.num_srcs = static_cast<int32_t>(srcs.size());
  table.aligned = all % 16 == 0;
  table.scale = scale;
  const unsigned num_tiles = static_cast<unsigned>((numel + kTile - 1) / kTile);
  with_conversion(from, to, accumulate, [&](auto from_tag, auto to_tag, auto add_tag) {
    reduce_kernel<typename decltype(from_tag)::Type, typename decltype(to_tag)::Type,
                  decltype(add_tag)::value>
        <<<num_tiles, kNumThreads, 0, static_cast<cudaStream_t>(stream)>>>(table);
  });
  check_launch("reduce");
}

}  // namespace fsdpx::cuda
