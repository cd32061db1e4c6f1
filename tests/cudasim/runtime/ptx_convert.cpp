// cvt, bit by bit, and the operations between the lanes of a warp.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "ptx.h"

namespace sim::ptx {
namespace {

using std::bit_cast;

float float_of(uint64_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits)); }

// ---- Formats

struct Fp8 {
  int mantissa, bias;
  bool has_infinity;
};
constexpr Fp8 kE4m3{3, 7, false}, kE5m2{2, 15, true};

float fp8_value(Fp8 f, unsigned code) {
  const int exponent = int(code & 0x7f) >> f.mantissa,
            fraction = int(code) & ((1 << f.mantissa) - 1);
  const bool top = exponent == (1 << (7 - f.mantissa)) - 1;
  const float sign = code & 0x80 ? -1.0f : 1.0f;
  if (top && f.has_infinity) return fraction ? NAN : sign * INFINITY;
  if (top && fraction == (1 << f.mantissa) - 1) return NAN;
  const float part = float(fraction) / float(1 << f.mantissa);
  return sign * (exponent ? std::ldexp(1 + part, exponent - f.bias) : std::ldexp(part, 1 - f.bias));
}

// Nearest even, finite values beyond the largest become the largest (.satfinite).
unsigned fp8_code(Fp8 f, float value) {
  if (std::isnan(value)) return 0x7f;
  const unsigned sign = std::signbit(value) ? 0x80 : 0;
  const double magnitude = std::fabs(double(value));
  unsigned low = 0;
  unsigned largest = 0x7f;
  while (!std::isfinite(fp8_value(f, largest))) --largest;
  if (magnitude >= fp8_value(f, largest)) return sign | largest;
  while (fp8_value(f, low + 1) <= magnitude) ++low;
  const double below = magnitude - fp8_value(f, low), above = fp8_value(f, low + 1) - magnitude;
  return sign | (below < above || (below == above && low % 2 == 0) ? low : low + 1);
}

uint64_t to_bf16(float value) {
  const uint32_t u = bit_cast<uint32_t>(value);
  return std::isnan(value) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16 & 0xffff;
}
uint64_t to_f16(double value) {  // the compiler rounds once, from double as well
  return std::isnan(value) ? 0x7fff : bit_cast<uint16_t>(static_cast<_Float16>(value));
}
uint64_t to_f32(double value) {
  return std::isnan(value) ? 0x7fffffff : bit_cast<uint32_t>(static_cast<float>(value));
}
uint64_t to_f64(double value) {
  return std::isnan(value) ? 0x7fffffffffffffff : bit_cast<uint64_t>(value);
}

double value_of(const std::string& format, uint64_t bits) {
  if (format == "f64") return bit_cast<double>(bits);
  if (format == "f32") return float_of(bits);
  if (format == "f16") return double(bit_cast<_Float16>(static_cast<uint16_t>(bits)));
  return float_of(bits << 16);  // bf16
}

bool is_plain_float(const std::string& format) {
  return format == "f64" || format == "f32" || format == "f16" || format == "bf16";
}

uint64_t bits_in(const std::string& format, double value, const Instruction& i) {
  if (format == "f64") return to_f64(value);
  if (format == "f32") return to_f32(value);
  if (format == "f16") return to_f16(value);
  if (double(float(value)) != value && !std::isnan(value))
    throw Unsupported(i.text);  // two roundings
  return to_bf16(float(value));
}

template <typename F>
Action lanes(F f) {
  return [f](Warp& warp, uint32_t active) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (active >> lane & 1) f(warp, lane);
    }
  };
}

double rounded(const std::string& how, double value) {
  if (how == "rzi") return std::trunc(value);
  if (how == "rni") return std::nearbyint(value);
  if (how == "rmi") return std::floor(value);
  return how == "rpi" ? std::ceil(value) : value;
}

// ---- cvt

// Pairs: the first source is the upper half.
Action convert_pair(const Instruction& i, const std::string& to, const std::string& from) {
  const Operand d = i.args.at(0), a = i.args.at(1);
  const bool e4m3 = (to + from).find("e4m3") != std::string::npos;
  const Fp8 format = e4m3 ? kE4m3 : kE5m2;
  if (from == "f32" && (to == "e4m3x2" || to == "e5m2x2")) {
    return lanes([=, b = i.args.at(2)](Warp& w, int lane) {
      w.put(d, lane,
            fp8_code(format, float_of(w.get(a, lane))) << 8 |
                fp8_code(format, float_of(w.get(b, lane))));
    });
  }
  if (from == "f32" && (to == "f16x2" || to == "bf16x2")) {
    const std::string half = to.substr(0, to.size() - 2);
    return lanes([=, b = i.args.at(2)](Warp& w, int lane) {
      w.put(d, lane,
            bits_in(half, float_of(w.get(a, lane)), i) << 16 |
                bits_in(half, float_of(w.get(b, lane)), i));
    });
  }
  if (to == "f16x2" && (from == "e4m3x2" || from == "e5m2x2")) {
    return lanes([=](Warp& w, int lane) {
      const uint64_t v = w.get(a, lane);
      w.put(d, lane,
            to_f16(fp8_value(format, v >> 8 & 255)) << 16 | to_f16(fp8_value(format, v & 255)));
    });
  }
  return {};
}

Action float_to_integer(const Instruction& i, Type to, const std::string& from,
                        const std::string& rounding) {
  if (to.bits > 32 || rounding.empty()) throw Unsupported(i.text);
  const double top = std::ldexp(1.0, to.is_signed() ? to.bits - 1 : to.bits) - 1;
  const double bottom = to.is_signed() ? -top - 1 : 0;
  return lanes([=, d = i.args.at(0), a = i.args.at(1)](Warp& w, int lane) {
    const double value = rounded(rounding, value_of(from, w.get(a, lane)));
    const double kept = std::isnan(value) ? 0 : std::clamp(value, bottom, top);
    w.put(d, lane, uint64_t(int64_t(kept)));
  });
}

Action integer_to_float(const Instruction& i, const std::string& to, Type from) {
  if (to != "f32" && to != "f64") throw Unsupported(i.text);
  const bool single = to == "f32";
  return lanes([=, d = i.args.at(0), a = i.args.at(1)](Warp& w, int lane) {
    const uint64_t raw = w.get(a, lane, from);
    const int64_t whole = sign_extend(raw, from.bits);
    const bool is_signed = from.is_signed();
    if (single) {
      w.put(d, lane, bit_cast<uint32_t>(is_signed ? float(whole) : float(raw)));
    } else {
      w.put(d, lane, bit_cast<uint64_t>(is_signed ? double(whole) : double(raw)));
    }
  });
}

Action convert(const Instruction& i) {
  if (i.op.size() < 3) throw Unsupported(i.text);
  expect(i, {"rn", "rzi", "rni", "rmi", "rpi", "satfinite"}, 2);
  const std::string to = i.op[i.op.size() - 2], from = i.op.back();
  if (Action pair = convert_pair(i, to, from)) return pair;
  if (i.has("satfinite")) throw Unsupported(i.text);
  std::string rounding;
  for (const char* how : {"rzi", "rni", "rmi", "rpi"}) rounding += i.has(how) ? how : "";
  const Operand d = i.args.at(0), a = i.args.at(1);
  if (is_plain_float(to) && is_plain_float(from)) {
    return lanes([=](Warp& w, int lane) {
      w.put(d, lane, bits_in(to, rounded(rounding, value_of(from, w.get(a, lane))), i));
    });
  }
  if (is_plain_float(from) && is_type(to))
    return float_to_integer(i, type_of(i, 2), from, rounding);
  if (is_plain_float(to) && is_type(from)) return integer_to_float(i, to, type_of(i));
  const Type wide = type_of(i), narrow = type_of(i, 2);
  return lanes([=](Warp& w, int lane) {
    const uint64_t value = w.get(a, lane, wide);
    const uint64_t extended = wide.is_signed() ? uint64_t(sign_extend(value, wide.bits)) : value;
    const uint64_t cut = low_bits(extended, narrow.bits);
    w.put(d, lane, narrow.is_signed() ? uint64_t(sign_extend(cut, narrow.bits)) : cut);
  });
}

// ---- Operations of a warp

// All lanes that the mask names, and that exist, must be here.
void check_members(const Warp& warp, const Instruction& i, uint32_t active, const Operand& mask) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(active >> lane & 1)) continue;
    const uint32_t named = static_cast<uint32_t>(warp.get(mask, lane));
    if ((named & warp.exists & ~active) || !(named >> lane & 1)) {
      warp.fail("warp operation that not all threads of its mask reached together", i, lane, named);
    }
  }
}

Action shuffle(const Instruction& i) {
  const std::string mode = i.op.at(2);
  const bool pair = i.args.at(0).kind == OperandKind::kVector;
  return [=](Warp& warp, uint32_t active) {
    check_members(warp, i, active, i.args.at(4));
    std::array<uint64_t, kLanes> values{};
    std::array<bool, kLanes> inside{};
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(active >> lane & 1)) continue;
      const int b = int(warp.get(i.args[2], lane)) & 31, c = int(warp.get(i.args[3], lane));
      const int segment = c >> 8 & 31, clamp = c & 31;
      const int first = lane & segment, last = first | (clamp & ~segment);
      const int from = mode == "bfly"   ? lane ^ b
                       : mode == "down" ? lane + b
                       : mode == "up"   ? lane - b
                                        : first | (b & ~segment);
      inside[lane] = mode == "up" ? from >= last : from <= last;
      const int source = inside[lane] ? from : lane;
      if (!(active >> source & 1)) warp.fail("shfl from a thread that is not there", i, lane, 0);
      values[lane] = warp.get(i.args[1], source);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(active >> lane & 1)) continue;
      warp.put(pair ? i.args[0].parts[0] : i.args[0], lane, values[lane]);
      if (pair) warp.put(i.args[0].parts[1], lane, inside[lane]);
    }
  };
}

Action vote(const Instruction& i) {
  const std::string mode = i.op.at(2);
  if (mode != "ballot" && mode != "any" && mode != "all") throw Unsupported(i.text);
  return [=](Warp& warp, uint32_t active) {
    check_members(warp, i, active, i.args.at(2));
    uint32_t ballot = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (active >> lane & 1 && warp.get(i.args[1], lane)) ballot |= uint32_t(1) << lane;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(active >> lane & 1)) continue;
      const bool result = mode == "any" ? ballot != 0 : ballot == active;
      warp.put(i.args[0], lane, mode == "ballot" ? ballot : result);
    }
  };
}

}  // namespace

Action bind_conversion(const Instruction& i) { return i.op[0] == "cvt" ? convert(i) : Action{}; }

Action bind_warp_operation(const Instruction& i) {
  const std::string& name = i.op[0];
  if (name == "shfl") return shuffle(i);
  if (name == "vote") return vote(i);
  if (name == "activemask") {
    return [=](Warp& warp, uint32_t active) {
      for (int lane = 0; lane < kLanes; ++lane) {
        if (active >> lane & 1) warp.put(i.args[0], lane, active);
      }
    };
  }
  if (name == "bar" && i.op.at(1) == "warp") {
    return [=](Warp& warp, uint32_t active) { check_members(warp, i, active, i.args.at(0)); };
  }
  if (name == "nanosleep") {
    return [](Warp& warp, uint32_t) { warp.polls += 1 << 16; };  // it waits for something
  }
  return {};
}

void bind(Instruction& i, const Kernel&) {
  const std::string& name = i.op[0];
  if (name == "bra") i.flow = Flow::kBranch;
  if (name == "ret" || name == "exit") i.flow = Flow::kReturn;
  if ((name == "bar" || name == "barrier") && i.op.at(1) != "warp") {
    const bool all = i.args.size() == 1 && i.args[0].kind == OperandKind::kImmediate;
    if (!i.has("sync") || !all || i.args[0].bits) throw Unsupported(i.text);
    i.flow = Flow::kBarrier;
  }
  if (name == "trap") {
    i.action = [=](Warp& warp, uint32_t) { warp.fail("trap", i, 0, 0); };
  }
  if (i.flow != Flow::kNext || i.action) return;
  for (auto* family : {bind_conversion, bind_memory, bind_warp_operation, bind_arithmetic}) {
    i.action = family(i);
    if (i.action) return;
  }
  throw Unsupported(i.text);
}

}  // namespace sim::ptx
