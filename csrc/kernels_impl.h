// The passes of one instruction set. Included by one .cpp file per set, which is compiled with that
// set's flags. Everything lies in a nameless namespace and calls no out-of-line function of another
// header, so that the linker cannot take code of one set for another's. The loops are written for
// the compiler's vectoriser; intrinsics remain where it knows no instruction: conversions of fp16
// and stores past the caches.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "element.h"
#include "kernels_table.h"

namespace fsdpx {
namespace {

constexpr int64_t kBlock = 1024;       // elements of an intermediate block: first-level cache
constexpr uintptr_t kStoreBytes = 64;  // a cache line

#if defined(__F16C__)
constexpr int64_t kHalfLanes = 8;

void widen_half(const Float16* src, float* dst, int64_t numel) {
  const int64_t whole = numel - numel % kHalfLanes;
  for (int64_t i = 0; i < whole; i += kHalfLanes) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(half));
  }
  for (int64_t i = whole; i < numel; ++i) dst[i] = widen<float>(src[i]);
}

// NaNs in `src` are canonical, and stay so in the hardware's conversion.
void narrow_half(const float* src, Float16* dst, int64_t numel) {
  const int64_t whole = numel - numel % kHalfLanes;
  for (int64_t i = 0; i < whole; i += kHalfLanes) {
    const __m256 value = _mm256_loadu_ps(src + i);
    const __m128i half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), half);
  }
  for (int64_t i = whole; i < numel; ++i) dst[i] = narrow<Float16>(src[i]);
}
#else
void widen_half(const Float16* src, float* dst, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) dst[i] = widen<float>(src[i]);
}

void narrow_half(const float* src, Float16* dst, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) dst[i] = narrow<Float16>(src[i]);
}
#endif

template <typename From, typename To, bool kAdd>
void convert(const From* __restrict src, To* __restrict dst, int64_t numel, double scale) {
  using Acc = Accumulator<From, To>;
  const Acc factor = static_cast<Acc>(scale);
  for (int64_t i = 0; i < numel; ++i) {
    Acc value = widen<Acc>(src[i]) * factor;
    if constexpr (kAdd) value += widen<Acc>(dst[i]);
    dst[i] = narrow<To>(value);
  }
}

// At most kBlock elements. Half precision goes through a block of floats, where a whole loop of
// hardware conversions is.
template <typename From, typename To, bool kAdd>
void convert_block(const From* src, To* dst, int64_t numel, double scale) {
  constexpr bool kInFloat = std::is_same_v<Accumulator<From, To>, float>;
  if constexpr (kInFloat && std::is_same_v<From, Float16>) {
    alignas(kStoreBytes) float wide[kBlock];
    widen_half(src, wide, numel);
    convert_block<float, To, kAdd>(wide, dst, numel, scale);
  } else if constexpr (kInFloat && std::is_same_v<To, Float16>) {
    alignas(kStoreBytes) float sum[kBlock];
    if constexpr (kAdd) widen_half(dst, sum, numel);
    convert<From, float, kAdd>(src, sum, numel, scale);
    narrow_half(sum, dst, numel);
  } else {
    convert<From, To, kAdd>(src, dst, numel, scale);
  }
}

template <typename From, typename To, bool kAdd>
void pass(const void* src, void* dst, int64_t numel, double scale) {
  const From* from = static_cast<const From*>(src);
  To* to = static_cast<To*>(dst);
  if constexpr (!std::is_same_v<From, Float16> && !std::is_same_v<To, Float16>) {
    convert<From, To, kAdd>(from, to, numel, scale);
  } else {
    for (int64_t i = 0; i < numel; i += kBlock) {
      const int64_t left = numel - i;
      convert_block<From, To, kAdd>(from + i, to + i, left < kBlock ? left : kBlock, scale);
    }
  }
}

// Copies whole cache lines past the caches. `src` and `dst` begin at a line.
void stream_lines(const void* src, void* dst, size_t nbytes) {
#if defined(__SSE2__)
  const __m128i* from = static_cast<const __m128i*>(src);
  __m128i* to = static_cast<__m128i*>(dst);
  for (size_t i = 0; i < nbytes / 16; i += 4) {
    for (size_t j = i; j < i + 4; ++j) _mm_stream_si128(to + j, _mm_load_si128(from + j));
  }
#else
  std::memcpy(dst, src, nbytes);
#endif
}

void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();  // such stores are ordered with later ones only by a fence
#endif
}

// Elements before the first cache line of `dst`.
template <typename To>
int64_t head_of(const To* dst, int64_t numel) {
  const uintptr_t past = reinterpret_cast<uintptr_t>(dst) % kStoreBytes;
  const int64_t head = static_cast<int64_t>((past == 0 ? 0 : kStoreBytes - past) / sizeof(To));
  return head < numel ? head : numel;
}

template <typename From, typename To>
void stream_pass(const void* src, void* dst, int64_t numel, double scale) {
  const From* from = static_cast<const From*>(src);
  To* to = static_cast<To*>(dst);
  alignas(kStoreBytes) To block[kBlock];
  int64_t i = head_of(to, numel);
  pass<From, To, false>(from, to, i, scale);
  for (; i + kBlock <= numel; i += kBlock) {
    convert_block<From, To, false>(from + i, block, kBlock, scale);
    stream_lines(block, to + i, sizeof(block));
  }
  pass<From, To, false>(from + i, to + i, numel - i, scale);
  finish_streaming();
}

void stream_copy(const void* src, void* dst, size_t nbytes) {
  const char* from = static_cast<const char*>(src);
  char* to = static_cast<char*>(dst);
  alignas(kStoreBytes) char block[4 * kBlock];
  size_t i = static_cast<size_t>(head_of(to, static_cast<int64_t>(nbytes)));
  std::memcpy(to, from, i);
  for (; i + sizeof(block) <= nbytes; i += sizeof(block)) {
    std::memcpy(block, from + i, sizeof(block));
    stream_lines(block, to + i, sizeof(block));
  }
  std::memcpy(to + i, from + i, nbytes - i);
  finish_streaming();
}

template <typename From>
constexpr void fill_row(PassTable& table, int from) {
  table.set[from][0] = pass<From, float, false>;
  table.set[from][1] = pass<From, double, false>;
  table.set[from][2] = pass<From, Float16, false>;
  table.set[from][3] = pass<From, BFloat16, false>;
  table.add[from][0] = pass<From, float, true>;
  table.add[from][1] = pass<From, double, true>;
  table.add[from][2] = pass<From, Float16, true>;
  table.add[from][3] = pass<From, BFloat16, true>;
  table.stream[from][0] = stream_pass<From, float>;
  table.stream[from][1] = stream_pass<From, double>;
  table.stream[from][2] = stream_pass<From, Float16>;
  table.stream[from][3] = stream_pass<From, BFloat16>;
}

// Rows and columns in the order of DType.
constexpr PassTable make_table(const char* isa) {
  PassTable table{};
  table.isa = isa;
  fill_row<float>(table, 0);
  fill_row<double>(table, 1);
  fill_row<Float16>(table, 2);
  fill_row<BFloat16>(table, 3);
  table.stream_copy = stream_copy;
  return table;
}

}  // namespace
}  // namespace fsdpx
