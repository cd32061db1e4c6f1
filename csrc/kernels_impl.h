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

constexpr uintptr_t kLineBytes = 64;  // a cache line
constexpr int64_t kChunk = 128;       // elements that are worked on at once
constexpr int64_t kLane = 1024;       // elements between lanes: about a page
constexpr int64_t kNumLanes = 4;

// Calls body(begin, count) for chunks that cover [0, numel), in turn from several lanes. The
// hardware prefetches within a page only; reading several pages at a time is up to 1.6 times as
// fast from memory, and no slower from the caches.
template <int64_t kCount, int64_t kDistance, typename Body>
void for_each_chunk(int64_t numel, const Body& body) {
  int64_t begin = 0;
  for (; begin + kNumLanes * kDistance <= numel; begin += kNumLanes * kDistance) {
    for (int64_t i = 0; i < kDistance; i += kCount) {
      for (int64_t lane = 0; lane < kNumLanes; ++lane) body(begin + lane * kDistance + i, kCount);
    }
  }
  for (; begin + kCount <= numel; begin += kCount) body(begin, kCount);
  if (begin < numel) body(begin, numel - begin);
}

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

// Eight bits widen and narrow in loops of integer arithmetic; as functions of their own they are
// compiled once, not in every pass.
template <typename Small>
[[gnu::noinline]] void widen_eighth(const Small* __restrict src, float* __restrict dst,
                                    int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) dst[i] = widen<float>(src[i]);
}

template <typename Small>
[[gnu::noinline]] void narrow_eighth(const float* __restrict src, Small* __restrict dst,
                                     int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) dst[i] = narrow<Small>(src[i]);
}

// Types that go through floats on their way.
template <typename T>
inline constexpr bool kThroughFloat = std::is_same_v<T, Float16> || sizeof(T) == 1;

template <typename T>
void widen_all(const T* src, float* dst, int64_t numel) {
  if constexpr (std::is_same_v<T, Float16>) {
    widen_half(src, dst, numel);
  } else {
    widen_eighth(src, dst, numel);
  }
}

template <typename T>
void narrow_all(const float* src, T* dst, int64_t numel) {
  if constexpr (std::is_same_v<T, Float16>) {
    narrow_half(src, dst, numel);
  } else {
    narrow_eighth(src, dst, numel);
  }
}

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

// At most kChunk elements. Half precision and eighths go through floats in between, where a loop of
// conversions alone is quicker than what the vectoriser makes.
template <typename From, typename To, bool kAdd>
void convert_chunk(const From* src, To* dst, int64_t numel, double scale) {
  constexpr bool kInFloat = std::is_same_v<Accumulator<From, To>, float>;
  if constexpr (kInFloat && kThroughFloat<From>) {
    alignas(kLineBytes) float wide[kChunk];
    widen_all(src, wide, numel);
    convert_chunk<float, To, kAdd>(wide, dst, numel, scale);
  } else if constexpr (kInFloat && kThroughFloat<To>) {
    alignas(kLineBytes) float sum[kChunk];
    if constexpr (kAdd) widen_all(dst, sum, numel);
    convert<From, float, kAdd>(src, sum, numel, scale);
    narrow_all(sum, dst, numel);
  } else {
    convert<From, To, kAdd>(src, dst, numel, scale);
  }
}

template <typename From, typename To, bool kAdd>
void pass(const void* src, void* dst, int64_t numel, double scale) {
  const From* from = static_cast<const From*>(src);
  To* to = static_cast<To*>(dst);
  for_each_chunk<kChunk, kLane>(numel, [&](int64_t begin, int64_t count) {
    convert_chunk<From, To, kAdd>(from + begin, to + begin, count, scale);
  });
}

// Copies whole cache lines past the caches; `dst` begins at one.
void stream_lines(const void* src, void* dst, size_t nbytes) {
#if defined(__SSE2__)
  const __m128i* from = static_cast<const __m128i*>(src);
  __m128i* to = static_cast<__m128i*>(dst);
  for (size_t i = 0; i < nbytes / sizeof(__m128i); ++i) {
    _mm_stream_si128(to + i, _mm_loadu_si128(from + i));
  }
#else
  std::memcpy(dst, src, nbytes);
#endif
}

// Elements before the first cache line of `dst`.
template <typename To>
int64_t head_of(const To* dst, int64_t numel) {
  const uintptr_t past = reinterpret_cast<uintptr_t>(dst) % kLineBytes;
  const int64_t head = static_cast<int64_t>((past == 0 ? 0 : kLineBytes - past) / sizeof(To));
  return head < numel ? head : numel;
}

template <typename From, typename To>
void stream_pass(const void* src, void* dst, int64_t numel, double scale) {
  const From* from = static_cast<const From*>(src);
  To* to = static_cast<To*>(dst);
  const int64_t head = head_of(to, numel);
  if (head > 0) convert_chunk<From, To, false>(from, to, head, scale);
  alignas(kLineBytes) To block[kChunk];
  for_each_chunk<kChunk, kLane>(numel - head, [&](int64_t begin, int64_t count) {
    begin += head;
    if (count == kChunk) {
      convert_chunk<From, To, false>(from + begin, block, kChunk, scale);
      stream_lines(block, to + begin, sizeof(block));
    } else {
      convert_chunk<From, To, false>(from + begin, to + begin, count, scale);
    }
  });
}

void stream_copy(const void* src, void* dst, int64_t nbytes) {
  constexpr int64_t kCopyChunk = 512;
  constexpr int64_t kCopyLane = 4096;
  const char* from = static_cast<const char*>(src);
  char* to = static_cast<char*>(dst);
  const int64_t head = head_of(to, nbytes);
  std::memcpy(to, from, static_cast<size_t>(head));
  for_each_chunk<kCopyChunk, kCopyLane>(nbytes - head, [&](int64_t begin, int64_t count) {
    begin += head;
    if (count == kCopyChunk) {
      stream_lines(from + begin, to + begin, kCopyChunk);
    } else {
      std::memcpy(to + begin, from + begin, static_cast<size_t>(count));
    }
  });
}

void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <typename From, typename To>
constexpr void fill(PassTable& table, int from, int to) {
  table.set[from][to] = pass<From, To, false>;
  table.add[from][to] = pass<From, To, true>;
  table.stream[from][to] = stream_pass<From, To>;
}

template <typename From>
constexpr void fill_row(PassTable& table, int from) {
  fill<From, float>(table, from, 0);
  fill<From, double>(table, from, 1);
  fill<From, Float16>(table, from, 2);
  fill<From, BFloat16>(table, from, 3);
  fill<From, Float8E4M3>(table, from, 4);
  fill<From, Float8E5M2>(table, from, 5);
}

// Rows and columns in the order of DType.
constexpr PassTable make_table(const char* isa) {
  PassTable table{};
  table.isa = isa;
  fill_row<float>(table, 0);
  fill_row<double>(table, 1);
  fill_row<Float16>(table, 2);
  fill_row<BFloat16>(table, 3);
  fill_row<Float8E4M3>(table, 4);
  fill_row<Float8E5M2>(table, 5);
  table.stream_copy = stream_copy;
  table.finish_streaming = finish_streaming;
  return table;
}

}  // namespace
}  // namespace fsdpx
