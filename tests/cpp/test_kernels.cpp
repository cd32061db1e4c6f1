// Kernels without Python: known roundings, all instruction sets bit for bit alike, spans, and
// errors.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/check.h"
#include "../../csrc/element.h"
#include "../../csrc/kernels.h"
#include "check.h"

namespace {

using fsdpx::BFloat16;
using fsdpx::ConstSpan;
using fsdpx::DType;
using fsdpx::Float16;
using fsdpx::InvalidArgument;
using fsdpx::itemsize;
using fsdpx::narrow;
using fsdpx::Span;
using fsdpx::widen;

constexpr DType kFloating[] = {DType::kFloat32,  DType::kFloat64,    DType::kFloat16,
                               DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2};
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<std::string> available_isas() {
  std::vector<std::string> found;
  for (const char* name : {"avx512", "avx2", "portable"}) {
    try {
      fsdpx::set_isa(name);
      found.push_back(name);
    } catch (const InvalidArgument&) {
    }
  }
  fsdpx::set_isa("auto");
  return found;
}

using Bytes = std::vector<unsigned char>;

Bytes random_bytes(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  Bytes bytes(static_cast<size_t>(count));
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(generator());
  return bytes;
}

}  // namespace

TEST(bfloat16_rounds_to_nearest_even) {
  const auto round = [](float value) { return narrow<BFloat16>(value).bits; };
  CHECK_EQ(round(1.0f), 0x3f80);
  CHECK_EQ(round(1.0f + 0x1p-8f), 0x3f80);            // tie: down to even
  CHECK_EQ(round(1.0f + 0x1p-7f + 0x1p-8f), 0x3f82);  // tie: up to even
  CHECK_EQ(round(1.0f + 0x1p-8f + 0x1p-20f), 0x3f81);
  CHECK_EQ(round(std::numeric_limits<float>::max()), 0x7f80);
  CHECK_EQ(round(-kInf), 0xff80);
  CHECK_EQ(round(0x1p-133f), 0x0001);  // the least subnormal
  CHECK_EQ(round(0x1p-134f), 0x0000);  // half of it
  CHECK_EQ(round(-0.0f), 0x8000);
  CHECK_EQ(round(std::nanf("1")), 0x7fc0);
}

TEST(float16_rounds_to_nearest_even) {
  const auto round = [](float value) { return narrow<Float16>(value).bits; };
  CHECK_EQ(round(1.0f), 0x3c00);
  CHECK_EQ(round(1.0f + 0x1p-11f), 0x3c00);
  CHECK_EQ(round(1.0f + 0x1p-10f + 0x1p-11f), 0x3c02);
  CHECK_EQ(round(65519.996f), 0x7bff);
  CHECK_EQ(round(65520.0f), 0x7c00);
  CHECK_EQ(round(-kInf), 0xfc00);
  CHECK_EQ(round(0x1p-24f), 0x0001);
  CHECK_EQ(round(0x1p-25f), 0x0000);
  CHECK_EQ(round(0x1.8p-24f), 0x0002);
  CHECK_EQ(round(0x1.ff8p-15f), 0x03ff);
  CHECK_EQ(round(0x1.ffcp-15f), 0x0400);  // the largest subnormal rounds up to a normal
  CHECK_EQ(round(-std::nanf("1")), 0x7e00);
}

TEST(float8_saturates_or_overflows) {
  const auto e4m3 = [](float value) { return narrow<fsdpx::Float8E4M3>(value).bits; };
  const auto e5m2 = [](float value) { return narrow<fsdpx::Float8E5M2>(value).bits; };
  CHECK_EQ(e4m3(1.0f), 0x38);
  CHECK_EQ(e4m3(1.0f + 0x1p-4f), 0x38);  // tie: down to even
  CHECK_EQ(e4m3(1.0f + 0x3p-4f), 0x3a);  // tie: up to even
  CHECK_EQ(e4m3(0x1p-9f), 0x01);         // the least subnormal
  CHECK_EQ(e4m3(0x1p-10f), 0x00);
  CHECK_EQ(e4m3(-1000.0f), 0xfe);
  CHECK_EQ(e4m3(kInf), 0x7e);
  CHECK_EQ(e4m3(std::nanf("1")), 0x7f);
  CHECK_EQ(e5m2(57344.0f), 0x7b);
  CHECK_EQ(e5m2(61440.0f), 0x7c);
  CHECK_EQ(e5m2(-kInf), 0xfc);
  CHECK_EQ(e5m2(0x1p-16f), 0x01);
  CHECK_EQ(e5m2(-std::nanf("1")), 0x7f);
}

TEST(doubles_round_once) {
  CHECK_EQ(narrow<BFloat16>(1.0 + 0x1p-8 + 0x1p-50).bits, 0x3f81);
  CHECK_EQ(narrow<BFloat16>(1.0 + 0x1p-8).bits, 0x3f80);
  CHECK_EQ(narrow<Float16>(1.0 + 0x1p-11 + 0x1p-50).bits, 0x3c01);
  CHECK_EQ(narrow<Float16>(-0x1p-25 - 0x1p-70).bits, 0x8001);
  CHECK_EQ(narrow<BFloat16>(1e300).bits, 0x7f80);
  CHECK_EQ(narrow<BFloat16>(-1e-320).bits, 0x8000);
  CHECK_EQ(narrow<Float16>(65520.0 - 0x1p-36).bits, 0x7bff);
}

TEST(half_precision_widens_and_returns) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float from_half = widen<float>(Float16{half});
    const float from_brain = widen<float>(BFloat16{half});
    const float magnitude = std::ldexp(static_cast<float>(half & 0x3ff), -24);
    if ((half & 0x7c00) == 0) CHECK_EQ(from_half, (half & 0x8000) != 0 ? -magnitude : magnitude);
    if (!std::isnan(from_half)) CHECK_EQ(narrow<Float16>(from_half).bits, half);
    if (!std::isnan(from_brain)) CHECK_EQ(narrow<BFloat16>(from_brain).bits, half);
  }
  CHECK_EQ(widen<float>(Float16{0x7c00}), kInf);
  CHECK_EQ(widen<float>(Float16{0x3555}), 0.333251953125f);
}

TEST(instruction_sets_agree_bit_for_bit) {
  const std::vector<std::string> isas = available_isas();
  for (DType from : kFloating) {
    for (DType to : kFloating) {
      for (int64_t numel : {1, 9, 63, 1029, 5003}) {
        for (bool accumulate : {false, true}) {
          const Bytes src = random_bytes(numel * itemsize(from) + 8, 1);
          const Bytes other = random_bytes(numel * itemsize(from), 2);
          const Bytes old = random_bytes(numel * itemsize(to) + 8, 3);
          std::vector<Bytes> casts, sums;
          for (const std::string& isa : isas) {
            fsdpx::set_isa(isa.c_str());
            casts.push_back(old);
            fsdpx::cast(src.data() + 8, from, casts.back().data() + 8, to, numel, 0.7, accumulate);
            sums.push_back(old);
            const void* sources[] = {src.data(), other.data(), src.data() + 8};
            fsdpx::reduce(sources, from, sums.back().data(), to, numel, 0.7, accumulate);
            CHECK(casts.back() == casts.front());
            CHECK(sums.back() == sums.front());
          }
        }
      }
    }
  }
  fsdpx::set_isa("auto");
}

TEST(pack_fills_gaps_and_unpack_returns) {
  const float a[] = {1, 2, 3}, b[] = {4};
  BFloat16 flat[8];
  for (BFloat16& value : flat) value = BFloat16{0xffff};
  const ConstSpan srcs[] = {{a, 3, 1}, {nullptr, 2, 4}, {b, 1, 6}};
  fsdpx::pack(srcs, DType::kFloat32, flat, DType::kBFloat16, 8, 2.0);
  const float expected[] = {0, 2, 4, 6, 0, 0, 8, 0};
  for (int i = 0; i < 8; ++i) CHECK_EQ(widen<float>(flat[i]), expected[i]);

  double back[3] = {10, 10, 10};
  const Span dsts[] = {{back, 2, 2}, {back + 2, 1, 6}, {nullptr, 0, 8}};
  fsdpx::unpack(flat, DType::kBFloat16, dsts, DType::kFloat64, 0.5, true);
  CHECK_EQ(back[0], 12.0);
  CHECK_EQ(back[1], 13.0);
  CHECK_EQ(back[2], 14.0);
}

// Large destinations are written past the caches, in lines; a sanitizer sees whether all stay
// inside.
TEST(large_results_end_where_they_should) {
  const int64_t numel = (int64_t{32} << 20) / itemsize(DType::kBFloat16) + 77;
  std::vector<float> src(static_cast<size_t>(numel));
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<float>(i % 509) - 254.0f;
  std::vector<BFloat16> room(src.size() + 1);
  BFloat16* const dst = room.data() + 1;
  for (const std::string& isa : available_isas()) {
    fsdpx::set_isa(isa.c_str());
    for (const bool sums : {false, true}) {
      const void* sources[] = {src.data(), src.data()};
      if (sums) {
        fsdpx::reduce(sources, DType::kFloat32, dst, DType::kBFloat16, numel, 0.5);
      } else {
        fsdpx::cast(src.data(), DType::kFloat32, dst, DType::kBFloat16, numel);
      }
      int64_t num_wrong = 0;
      for (size_t i = 0; i < src.size(); ++i)
        num_wrong += dst[i].bits != narrow<BFloat16>(src[i]).bits;
      CHECK_EQ(num_wrong, 0);
      std::fill(room.begin(), room.end(), BFloat16{0xffff});
    }
    std::vector<float> copy(src.size());
    fsdpx::cast(src.data(), DType::kFloat32, copy.data(), DType::kFloat32, numel);
    CHECK(copy == src);
  }
  fsdpx::set_isa("auto");
}

TEST(copies_take_any_address_and_keep_bits) {
  const Bytes src = random_bytes(100, 4);
  for (int code = 0; code <= static_cast<int>(DType::kBits128); ++code) {
    const DType dtype = static_cast<DType>(code);
    const int64_t numel = 80 / itemsize(dtype);
    Bytes dst(100);
    fsdpx::cast(src.data() + 3, dtype, dst.data() + 5, dtype, numel);
    CHECK(std::equal(src.begin() + 3, src.begin() + 83, dst.begin() + 5));
    CHECK(dst[4] == 0 && dst[85] == 0);
  }
}

TEST(requests_that_make_no_sense_are_refused) {
  float a[4] = {}, b[4] = {};
  const auto cast = [&](const void* src, int64_t numel, DType to = DType::kFloat64) {
    fsdpx::cast(src, DType::kFloat32, b, to, numel);
  };
  CHECK_THROWS(InvalidArgument, "numel is -1", cast(a, -1));
  CHECK_THROWS(InvalidArgument, "source 0 is a null pointer", cast(nullptr, 1));
  CHECK_THROWS(InvalidArgument, "not aligned to the 4 bytes of float32",
               cast(reinterpret_cast<char*>(a) + 1, 1));
  CHECK_THROWS(InvalidArgument, "overlap at source 0", cast(b + 1, 1));
  CHECK_THROWS(InvalidArgument, "float32 to bits32", cast(a, 1, DType::kBits32));
  const ConstSpan outside[] = {{a, 2, 3}};
  CHECK_THROWS(InvalidArgument, "span 0 covers elements [3, 3 + 2) of a flat buffer of 4",
               fsdpx::pack(outside, DType::kFloat32, b, DType::kFloat32, 4));
  const ConstSpan crossing[] = {{a, 2, 0}, {a, 2, 1}};
  CHECK_THROWS(InvalidArgument, "spans must ascend",
               fsdpx::pack(crossing, DType::kFloat32, b, DType::kFloat32, 4));
  const void* sources[] = {a, a + 1};
  CHECK_THROWS(InvalidArgument, "bits32 cannot be added",
               fsdpx::reduce(sources, DType::kBits32, b, DType::kBits32, 2));
  CHECK_THROWS(InvalidArgument, "no sources",
               fsdpx::reduce({}, DType::kFloat32, b, DType::kFloat32, 2));
  CHECK_THROWS(InvalidArgument, "portable", fsdpx::set_isa("none"));
}
