// Subnormals are kept and rounding is to nearest even in a scope, whatever the calling thread has
// set.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace fsdpx {

class FloatEnvironment {
 public:
#if defined(__SSE2__)
  FloatEnvironment() : saved_(_mm_getcsr()) {
    if (saved_ != kDefault) _mm_setcsr(kDefault);
  }
  ~FloatEnvironment() {
    if (saved_ != kDefault) _mm_setcsr(saved_);
  }
#else
  FloatEnvironment() = default;
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

#if defined(__SSE2__)
 private:
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked, nothing else
  const unsigned saved_;
#endif
};

}  // namespace fsdpx
