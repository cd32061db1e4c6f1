// Element functions of the floating types, shared by the CPU and CUDA kernels: widen to the
// accumulation type, round back once to nearest even. Both sides give the same bits: subnormals are
// kept, overflow becomes infinity, and every NaN becomes the canonical quiet NaN (which NaN an
// addition of two returns depends on the order that a compiler chose, so payloads could not be kept
// alike anyway). float8_e4m3fn has no infinity: what is larger than 448 becomes 448, infinity too.
// All this is what torch's `to` does.
//
// Everything here is forced inline: these functions are compiled with several instruction sets, and
// an out-of-line copy of one must not be the copy that the linker keeps for all.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define FSDPX_HD __host__ __device__ __forceinline__
#else
#define FSDPX_HD [[gnu::always_inline]] inline
#endif

namespace fsdpx {

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

struct Float8E4M3 {
  uint8_t bits;
};

struct Float8E5M2 {
  uint8_t bits;
};

// The type that arithmetic between `From` and `To` runs in.
template <typename From, typename To>
using Accumulator =
    std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double, float>;

// Arithmetic that is rounded operation by operation. On a GPU nothing is fused, whatever flags this
// is compiled with; on a CPU the build's flags see to it.
#if defined(__CUDA_ARCH__)
FSDPX_HD float add(float a, float b) { return __fadd_rn(a, b); }
FSDPX_HD double add(double a, double b) { return __dadd_rn(a, b); }
FSDPX_HD float multiply(float a, float b) { return __fmul_rn(a, b); }
FSDPX_HD double multiply(double a, double b) { return __dmul_rn(a, b); }
FSDPX_HD float divide(float a, float b) { return __fdiv_rn(a, b); }
FSDPX_HD float square_root(float a) { return __fsqrt_rn(a); }
#else
FSDPX_HD float add(float a, float b) { return a + b; }
FSDPX_HD double add(double a, double b) { return a + b; }
FSDPX_HD float multiply(float a, float b) { return a * b; }
FSDPX_HD double multiply(double a, double b) { return a * b; }
FSDPX_HD float divide(float a, float b) { return a / b; }
FSDPX_HD float square_root(float a) { return __builtin_sqrtf(a); }
#endif

namespace element {

inline constexpr uint32_t kFloatNan = 0x7fc00000u;
inline constexpr uint64_t kDoubleNan = 0x7ff8000000000000u;
inline constexpr uint32_t kFloatInf = 0x7f800000u;

FSDPX_HD uint32_t to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
FSDPX_HD float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Replaces any NaN by the canonical one.
FSDPX_HD float quiet(float value) { return value == value ? value : from_bits(kFloatNan); }
FSDPX_HD double quiet(double value) {
  return value == value ? value : __builtin_bit_cast(double, kDoubleNan);
}

// A float of 8 or 16 bits: sign, exponent, mantissa. `kLargest` is the code that overflow becomes
// (infinity where there is one), `kSpecial` the first code that is no finite number.
template <int kBits, int kMantissaBits, uint32_t kLargest, uint32_t kSpecial, uint32_t kNan>
struct Small {
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kBias = (1 << (kBits - kMantissaBits - 2)) - 1;
  static constexpr int kShift = 23 - kMantissaBits;  // mantissa bits that a float has more
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kSign = 1u << (kBits - 1);
  // A float whose last bit is worth as much as the last bit of a subnormal.
  static constexpr uint32_t kUnit = static_cast<uint32_t>(127 + 24 - kBias - kMantissaBits) << 23;

  FSDPX_HD static float widen(uint32_t code) {
    const uint32_t magnitude = code & (kSign - 1);
    const uint32_t sign = (code & kSign) << (32 - kBits);
    const uint32_t normal = (magnitude << kShift) + kRebias;
    const uint32_t subnormal = to_bits(add(from_bits(kUnit + magnitude), -from_bits(kUnit)));
    const uint32_t finite = magnitude < (1u << kMantissaBits) ? subnormal : normal;
    // The exponent of infinity and NaN is all ones in a float, too.
    const uint32_t special = (magnitude - kLargest) << kShift | kFloatInf;
    return from_bits(sign | (magnitude >= kSpecial ? special : finite));
  }

  FSDPX_HD static uint32_t narrow(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = bits >> (32 - kBits) & kSign;
    const uint32_t rebiased = magnitude - kRebias;
    const uint32_t half = (1u << (kShift - 1)) - 1;
    const uint32_t rounded = (rebiased + half + ((rebiased >> kShift) & 1u)) >> kShift;
    const uint32_t normal = rounded < kLargest ? rounded : kLargest;
    // The addition rounds to units of the last subnormal bit.
    const uint32_t subnormal = to_bits(add(from_bits(magnitude), from_bits(kUnit))) - kUnit;
    const uint32_t finite = magnitude < kRebias + (1u << 23) ? subnormal : normal;
    return magnitude > kFloatInf ? kNan : (sign | finite);
  }
};

using Half = Small<16, 10, 0x7c00, 0x7c00, 0x7e00>;
using E4M3 = Small<8, 3, 0x7e, 0x7f, 0x7f>;
using E5M2 = Small<8, 2, 0x7c, 0x7c, 0x7f>;

FSDPX_HD float half_to_float(uint16_t half) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(half));
#else
  return Half::widen(half);
#endif
}

FSDPX_HD uint16_t float_to_half(float value) {
#if defined(__CUDA_ARCH__)
  return value == value ? __half_as_ushort(__float2half_rn(value)) : 0x7e00;
#else
  return static_cast<uint16_t>(Half::narrow(value));
#endif
}

FSDPX_HD float bfloat16_to_float(uint16_t half) {
  return from_bits(static_cast<uint32_t>(half) << 16);
}

// Rounds the value that `bits` of a float stand for. A NaN must be canonical: rounding must not
// carry into its exponent.
FSDPX_HD uint16_t round_to_bfloat16(uint32_t bits) {
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The float next to `value` whose last bit is odd, unless `value` is exact. A float has at least
// two bits more than the smaller types everywhere in their range, so rounding this result to one of
// them is the same as rounding `value` once.
FSDPX_HD float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  const uint32_t bits = to_bits(nearest);
  const double magnitude = value < 0 ? -value : value;
  const double back_magnitude = back < 0 ? -back : back;
  // Stepping the bits steps the magnitude; from infinity down to the largest float, which is odd.
  const uint32_t stepped = back_magnitude < magnitude ? bits + 1u : bits - 1u;
  const bool keep = back == value || (bits & 1u) != 0 || value != value;
  return from_bits(keep ? bits : stepped);
}

}  // namespace element

// The value of an element in the accumulation type; exact.
template <typename Acc, typename T>
FSDPX_HD Acc widen(T value) {
  if constexpr (std::is_same_v<T, Float16>) {
    return static_cast<Acc>(element::half_to_float(value.bits));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return static_cast<Acc>(element::bfloat16_to_float(value.bits));
  } else if constexpr (std::is_same_v<T, Float8E4M3>) {
    return static_cast<Acc>(element::E4M3::widen(value.bits));
  } else if constexpr (std::is_same_v<T, Float8E5M2>) {
    return static_cast<Acc>(element::E5M2::widen(value.bits));
  } else {
    return static_cast<Acc>(value);
  }
}

// The element nearest to a value of the accumulation type, ties to even.
template <typename T, typename Acc>
FSDPX_HD T narrow(Acc wide) {
  if constexpr (std::is_same_v<T, Acc>) {
    return element::quiet(wide);
  } else if constexpr (std::is_same_v<T, float>) {
    return element::quiet(static_cast<float>(wide));
  } else {
    float value;
    if constexpr (std::is_same_v<Acc, double>) {
      value = element::round_to_odd(wide);
    } else {
      value = wide;
    }
    if constexpr (std::is_same_v<T, Float16>) {
      return Float16{element::float_to_half(value)};
    } else if constexpr (std::is_same_v<T, Float8E4M3>) {
      return Float8E4M3{static_cast<uint8_t>(element::E4M3::narrow(value))};
    } else if constexpr (std::is_same_v<T, Float8E5M2>) {
      return Float8E5M2{static_cast<uint8_t>(element::E5M2::narrow(value))};
    } else {
      static_assert(std::is_same_v<T, BFloat16>);
      return BFloat16{element::round_to_bfloat16(element::to_bits(element::quiet(value)))};
    }
  }
}

}  // namespace fsdpx
