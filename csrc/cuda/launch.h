// What launches share: sizes, from dtypes to types, alignment, and errors.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "../check.h"
#include "../dtype.h"
#include "../element.h"

namespace fsdpx::cuda {

constexpr int kNumThreads = 256;    // of a block
constexpr int64_t kTile = 8192;     // elements of one block
constexpr int32_t kNoVectors = -1;  // in place of a number of elements, where none aligns

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
    case DType::kFloat8E4M3:
      return visit(Tag<Float8E4M3>{});
    case DType::kFloat8E5M2:
      return visit(Tag<Float8E5M2>{});
    default:
      check(false, "CUDA pass: ", name(dtype),
            " has no arithmetic; it can only be copied as it is");
  }
}

inline void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("fsdpx: the CUDA pass ") + what +
                             " could not be launched: " + cudaGetErrorString(error));
  }
}

inline bool is_element_aligned(const void* data, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % std::min<int64_t>(itemsize(dtype), 8) == 0;
}

// A buffer that a kernel walks along: its address and the bytes of an element.
struct Walk {
  uintptr_t address;
  int64_t itemsize;
};

// The least number of elements after which all addresses are multiples of 16 bytes; kNoVectors when
// there is none, or when there are not that many elements.
inline int32_t elements_to_alignment(std::initializer_list<Walk> walks, int64_t numel) {
  const auto aligned_after = [&](int64_t count) {
    return std::all_of(walks.begin(), walks.end(), [&](const Walk& walk) {
      return (walk.address + static_cast<uintptr_t>(count * walk.itemsize)) % 16 == 0;
    });
  };
  // The smallest elements take the longest to come round again.
  int64_t period = 1;
  for (const Walk& walk : walks) period = std::max(period, 16 / walk.itemsize);
  for (int64_t count = 0; count < std::min(period, numel); ++count) {
    if (aligned_after(count)) return static_cast<int32_t>(count);
  }
  return kNoVectors;
}

// Blocks for `numel` elements of which `head` come before the first tile.
inline int64_t tiles_of(int64_t numel, int32_t head) {
  return (numel - std::max(head, 0) + kTile - 1) / kTile;
}

}  // namespace fsdpx::cuda
