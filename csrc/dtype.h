// Element types of flat buffers. Arithmetic (cast, scale, accumulate) exists for the floating
// types; every other torch dtype travels as opaque bits of its size and is only ever copied.
#pragma once

#include <cstdint>

namespace fsdpx {

enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kFloat8E4M3 = 4,  // finite values and NaN only ("fn")
  kFloat8E5M2 = 5,
  kBits8 = 6,
  kBits16 = 7,
  kBits32 = 8,
  kBits64 = 9,
  kBits128 = 10,
};

constexpr int64_t itemsize(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kBits32:
      return 4;
    case DType::kFloat64:
    case DType::kBits64:
      return 8;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kBits16:
      return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kBits8:
      return 1;
    case DType::kBits128:
      return 16;
  }
  return 0;
}

constexpr bool is_floating(DType dtype) { return dtype <= DType::kFloat8E5M2; }

constexpr const char* name(DType dtype) {
  constexpr const char* kNames[] = {"float32",       "float64",     "float16", "bfloat16",
                                    "float8_e4m3fn", "float8_e5m2", "bits8",   "bits16",
                                    "bits32",        "bits64",      "bits128"};
  return kNames[static_cast<uint8_t>(dtype)];
}

}  // namespace fsdpx
