// Element functions of the floating types, shared by the CPU and CUDA kernels: widen to the
// accumulation type, round back once to nearest even. Both sides give the same bits: subnormals are
// kept, overflow becomes infinity, and every NaN becomes the canonical quiet NaN (which NaN an
// addition of two returns depends on the order that a compiler chose, so payloads could not be kept
// alike anyway).
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

// The type that arithmetic between `From` and `To` runs in.
template <typename From, typename To>
using Accumulator =
    std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double, float>;

namespace element {

inline constexpr uint32_t kFloatNan = 0x7fc00000u;
inline constexpr uint64_t kDoubleNan = 0x7ff8000000000000u;
inline constexpr uint32_t kFloatInf = 0x7f800000u;
inline constexpr uint32_t kHalfNan = 0x7e00u;
inline constexpr uint32_t kHalfInf = 0x7c00u;

FSDPX_HD uint32_t to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
FSDPX_HD float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Replaces any NaN by the canonical one.
FSDPX_HD float quiet(float value) { return value == value ? value : from_bits(kFloatNan); }
FSDPX_HD double quiet(double value) {
  return value == value ? value : __builtin_bit_cast(double, kDoubleNan);
}

FSDPX_HD float half_to_float(uint16_t half) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(half));
#else
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t sign = (half & 0x8000u) << 16;
  // Exponents are biased by 15 and 127. Those of infinity and NaN are all ones, which takes the
  // difference of 112 a second time.
  const uint32_t normal = (magnitude << 13) + (magnitude >= kHalfInf ? 0x70000000u : 0x38000000u);
  // Subnormals count in units of 2^-24, which is the unit in the last place of 0.5.
  const uint32_t subnormal = to_bits(from_bits(0x3f000000u + magnitude) - 0.5f);
  return from_bits(sign | (magnitude < 0x0400u ? subnormal : normal));
#endif
}

FSDPX_HD uint16_t float_to_half(float value) {
#if defined(__CUDA_ARCH__)
  return value == value ? __half_as_ushort(__float2half_rn(value)) : kHalfNan;
#else
  const uint32_t bits = to_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rebiased = magnitude - 0x38000000u;
  const uint32_t rounded = (rebiased + 0x0fffu + ((rebiased >> 13) & 1u)) >> 13;
  const uint32_t normal = rounded < kHalfInf ? rounded : kHalfInf;
  // Adding 0.5 rounds to units of 2^-24, the subnormals' own.
  const uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return static_cast<uint16_t>(magnitude > kFloatInf ? kHalfNan : (sign | finite));
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
// two bits more than the 16-bit types everywhere in their range, so rounding this result to one of
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
    } else {
      static_assert(std::is_same_v<T, BFloat16>);
      return BFloat16{element::round_to_bfloat16(element::to_bits(element::quiet(value)))};
    }
  }
}

}  // namespace fsdpx
