// The passes' kernel arguments, and their launches. Tables of pointers travel by value, so a launch
// needs no memory of its own.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "launch.h"

namespace fsdpx::cuda {

constexpr int kMaxPieces = 112;  // the table stays below 4 KiB of arguments

struct PieceEntry {
  const void* src;
  int64_t dst;  // bytes after each base
  int64_t numel;
  uint32_t first_tile;
  int32_t head;  // elements before all pointers are multiples of 16 bytes, or kNoVectors
};

struct PieceTable {
  PieceEntry pieces[kMaxPieces];  // ascending first_tile, none empty
  char* bases[kMaxPeers];
  double scale;
  uint32_t num_tiles;
  int32_t num_pieces;
  int32_t num_bases;
  int32_t accumulate;  // with one base only
};

struct SumTable {
  const void* srcs[kMaxSources];
  void* dst;
  int64_t numel;
  double scale;
  uint32_t num_tiles;
  int32_t num_srcs;
  int32_t head;
  int32_t accumulate;
};

static_assert(sizeof(PieceTable) <= 4096 && sizeof(SumTable) <= 4096);

// Where a pass goes, and how many blocks it may take; see kNoLimit.
struct Launch {
  cudaStream_t stream;
  int max_blocks;

  unsigned blocks(uint32_t num_tiles) const {
    return std::min(num_tiles, static_cast<unsigned>(max_blocks));
  }
};

template <typename To>
void launch_convert(const PieceTable& table, DType from, const Launch& launch);

template <typename To>
void launch_reduce(const SumTable& table, DType from, const Launch& launch);

// Copies bits in units of 1, 2, 4 or 8 bytes.
void launch_copy(const PieceTable& table, int64_t unit_bytes, const Launch& launch);

}  // namespace fsdpx::cuda
