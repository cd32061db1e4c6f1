// What each instruction set offers to kernels.cpp: plain functions over contiguous elements. This
// header must stay free of inline functions, for it is included where other instruction sets are
// allowed.
#pragma once

#include <cstdint>

namespace fsdpx {

inline constexpr int kNumFloating = 6;  // the first codes of DType

// dst[i] = narrow(widen(src[i]) * scale) (+ dst[i] before narrowing, in `add`)
using Pass = void (*)(const void* src, void* dst, int64_t numel, double scale);

struct PassTable {
  const char* isa;
  Pass set[kNumFloating][kNumFloating];  // [from][to]
  Pass add[kNumFloating][kNumFloating];
  // `set` and a copy of bytes with stores past the caches. Other threads may read after
  // finish_streaming(): such stores are ordered with later ones only by a fence.
  Pass stream[kNumFloating][kNumFloating];
  void (*stream_copy)(const void* src, void* dst, int64_t nbytes);
  void (*finish_streaming)();
};

extern const PassTable kPortablePasses;
#if defined(__x86_64__)
extern const PassTable kAvx2Passes;
extern const PassTable kAvx512Passes;
#endif

}  // namespace fsdpx
