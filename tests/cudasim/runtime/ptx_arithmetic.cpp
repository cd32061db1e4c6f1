// Arithmetic, logic, comparisons and selection. Floats round to nearest even, once; NaN results
// are the one NaN that the hardware makes.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "ptx.h"

namespace sim::ptx {
namespace {

using std::bit_cast;
using Unary = std::function<uint64_t(uint64_t)>;
using Binary = std::function<uint64_t(uint64_t, uint64_t)>;
using Ternary = std::function<uint64_t(uint64_t, uint64_t, uint64_t)>;

uint64_t bits_of(float value) {
  return std::isnan(value) ? 0x7fffffffu : bit_cast<uint32_t>(value);
}
uint64_t bits_of(double value) {
  return std::isnan(value) ? 0x7fffffffffffffffu : bit_cast<uint64_t>(value);
}
float float_of(uint64_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits)); }
double double_of(uint64_t bits) { return bit_cast<double>(bits); }

// Subnormals become zeros (.ftz).
float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

template <typename F>
Action lanes(F f) {
  return [f](Warp& warp, uint32_t active) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (active >> lane & 1) f(warp, lane);
    }
  };
}

// d = f(a, b, ...) on values of one type.
Action of_sources(const Instruction& i, Unary f) {
  const Type t = type_of(i);
  return lanes([d = i.args.at(0), a = i.args.at(1), t, f](Warp& w, int lane) {
    w.put(d, lane, f(w.get(a, lane, t)));
  });
}
Action of_sources(const Instruction& i, Binary f) {
  const Type t = type_of(i);
  return lanes([d = i.args.at(0), a = i.args.at(1), b = i.args.at(2), t, f](Warp& w, int lane) {
    w.put(d, lane, f(w.get(a, lane, t), w.get(b, lane, t)));
  });
}
Action of_sources(const Instruction& i, Ternary f) {
  const Type t = type_of(i);
  return lanes([d = i.args.at(0), a = i.args.at(1), b = i.args.at(2), c = i.args.at(3), t, f](
                   Warp& w, int lane) {
    w.put(d, lane, f(w.get(a, lane, t), w.get(b, lane, t), w.get(c, lane, t)));
  });
}

// ---- Floats

template <typename F>
Action float_binary(const Instruction& i, F f) {
  const Type t = type_of(i);
  const bool ftz = i.has("ftz");
  if (t.bits == 64) {
    return of_sources(i, Binary([f](uint64_t a, uint64_t b) {
                        return bits_of(double(f(double_of(a), double_of(b))));
                      }));
  }
  if (t.bits != 32) throw Unsupported(i.text);
  return of_sources(i, Binary([f, ftz](uint64_t a, uint64_t b) {
                      const float x = float_of(a), y = float_of(b);
                      return ftz ? bits_of(flushed(float(f(flushed(x), flushed(y)))))
                                 : bits_of(float(f(x, y)));
                    }));
}

template <typename F>
Action float_unary(const Instruction& i, F f) {
  const Type t = type_of(i);
  const bool ftz = i.has("ftz");
  if (t.bits == 64) {
    return of_sources(i, Unary([f](uint64_t a) { return bits_of(double(f(double_of(a)))); }));
  }
  if (t.bits != 32) throw Unsupported(i.text);
  return of_sources(i, Unary([f, ftz](uint64_t a) {
                      const float x = float_of(a);
                      return ftz ? bits_of(flushed(float(f(flushed(x))))) : bits_of(float(f(x)));
                    }));
}

Action float_arithmetic(const Instruction& i) {
  const std::string& name = i.op[0];
  if (name == "neg" || name == "abs") {  // of the sign bit only, NaN payloads stay
    expect(i, {"ftz"});
    const uint64_t sign = uint64_t(1) << (type_of(i).bits - 1);
    const bool negate = name == "neg";
    return of_sources(i, Unary([=](uint64_t a) { return negate ? a ^ sign : a & ~sign; }));
  }
  if (name == "min" || name == "max") {
    expect(i, {"ftz"});
    const bool max = name == "max";
    return float_binary(i, [max](auto x, auto y) {
      if (x == y) return std::signbit(x) == max ? y : x;  // -0 is below +0
      return max ? std::fmax(x, y) : std::fmin(x, y);
    });
  }
  expect(i, {"rn", "ftz", "approx", "full"});
  if (name == "add") return float_binary(i, [](auto x, auto y) { return x + y; });
  if (name == "sub") return float_binary(i, [](auto x, auto y) { return x - y; });
  if (name == "mul") return float_binary(i, [](auto x, auto y) { return x * y; });
  if (name == "div") return float_binary(i, [](auto x, auto y) { return x / y; });
  if (name == "sqrt") return float_unary(i, [](auto x) { return std::sqrt(x); });
  if (name == "rcp") return float_unary(i, [](auto x) { return decltype(x)(1) / x; });
  if (name == "rsqrt") return float_unary(i, [](auto x) { return 1.0 / std::sqrt(double(x)); });
  if (name == "ex2") return float_unary(i, [](auto x) { return std::exp2(double(x)); });
  if (name == "lg2") return float_unary(i, [](auto x) { return std::log2(double(x)); });
  if (name == "fma" && type_of(i).bits == 64) {
    return of_sources(i, Ternary([](uint64_t a, uint64_t b, uint64_t c) {
                        return bits_of(std::fma(double_of(a), double_of(b), double_of(c)));
                      }));
  }
  if (name == "fma" && type_of(i).bits == 32 && !i.has("ftz")) {
    return of_sources(i, Ternary([](uint64_t a, uint64_t b, uint64_t c) {
                        return bits_of(std::fma(float_of(a), float_of(b), float_of(c)));
                      }));
  }
  return {};
}

// ---- Integers, as 64-bit values with the sign extended when there is one

template <typename F>
Action integer_binary(const Instruction& i, F f) {
  const Type t = type_of(i);
  return of_sources(i, Binary([=](uint64_t a, uint64_t b) {
                      return t.is_signed()
                                 ? uint64_t(f(sign_extend(a, t.bits), sign_extend(b, t.bits)))
                                 : uint64_t(f(a, b));
                    }));
}

__int128 product(uint64_t a, uint64_t b, Type t) {
  return t.is_signed() ? __int128(sign_extend(a, t.bits)) * sign_extend(b, t.bits)
                       : __int128(static_cast<unsigned __int128>(a) * b);
}

// mul and mad: the low or the high half, or all of the product.
Action multiply(const Instruction& i) {
  expect(i, {"lo", "hi", "wide"});
  const Type t = type_of(i);
  const Type sum{t.kind, i.has("wide") ? 2 * t.bits : t.bits};
  const int shift = i.has("hi") ? t.bits : 0;
  const bool adds = i.op[0] == "mad";
  return lanes([=, d = i.args.at(0), a = i.args.at(1), b = i.args.at(2),
                c = adds ? i.args.at(3) : Operand{}](Warp& w, int lane) {
    const __int128 p = product(w.get(a, lane, t), w.get(b, lane, t), t);
    const uint64_t more = adds ? w.get(c, lane, sum) : 0;
    w.put(d, lane, low_bits(static_cast<uint64_t>(p >> shift) + more, sum.bits));
  });
}

Action divide(const Instruction& i, bool remainder) {
  expect(i, {});
  return integer_binary(i, [remainder](auto a, auto b) -> decltype(a) {
    if (b == 0) return remainder ? a : decltype(a)(-1);  // unspecified in PTX
    if (b == decltype(b)(-1) && a == std::numeric_limits<decltype(a)>::min())
      return remainder ? 0 : a;
    return remainder ? a % b : a / b;
  });
}

Action shift(const Instruction& i) {
  expect(i, {});
  const Type t = type_of(i);
  const bool left = i.op[0] == "shl";
  return lanes([=, d = i.args.at(0), a = i.args.at(1), b = i.args.at(2)](Warp& w, int lane) {
    const uint64_t value = w.get(a, lane, t), by = w.get(b, lane, {'u', 32});
    const int most = t.bits - 1;
    if (t.is_signed() && !left) {
      const int n = by > uint64_t(most) ? most : int(by);
      w.put(d, lane, uint64_t(sign_extend(value, t.bits) >> n));
    } else {
      w.put(d, lane, by > uint64_t(most) ? 0 : left ? value << by : value >> by);
    }
  });
}

Action logic(const Instruction& i) {
  expect(i, {});
  const std::string& name = i.op[0];
  if (name == "not") {
    const uint64_t all = low_bits(~uint64_t(0), type_of(i).bits);
    return of_sources(i, Unary([all](uint64_t a) { return ~a & all; }));
  }
  if (name == "and") return of_sources(i, Binary([](uint64_t a, uint64_t b) { return a & b; }));
  if (name == "or") return of_sources(i, Binary([](uint64_t a, uint64_t b) { return a | b; }));
  return of_sources(i, Binary([](uint64_t a, uint64_t b) { return a ^ b; }));
}

Action bit_operation(const Instruction& i) {
  const std::string& name = i.op[0];
  if (name == "popc") return of_sources(i, Unary([](uint64_t a) { return std::popcount(a); }));
  if (name == "clz") {
    const int bits = type_of(i).bits;
    return of_sources(i, Unary([bits](uint64_t a) { return std::countl_zero(a) - 64 + bits; }));
  }
  if (name == "prmt" && i.op.size() == 2) {  // each nibble of c picks one of the eight bytes of b:a
    return of_sources(i, Ternary([](uint64_t a, uint64_t b, uint64_t c) {
                        const uint64_t both = a | b << 32;
                        uint64_t result = 0;
                        for (int n = 0; n < 4; ++n) {
                          const uint64_t pick = c >> (4 * n) & 15;
                          uint64_t byte = both >> (8 * (pick & 7)) & 255;
                          if (pick & 8) byte = byte & 128 ? 255 : 0;
                          result |= byte << (8 * n);
                        }
                        return result;
                      }));
  }
  if (name == "bfe" && !type_of(i).is_signed()) {
    return of_sources(i, Ternary([](uint64_t a, uint64_t at, uint64_t n) {
                        at &= 255, n &= 255;
                        return at > 63 ? 0 : low_bits(a >> at, int(std::min<uint64_t>(n, 64)));
                      }));
  }
  if (name == "shf" && i.has("wrap")) {  // a funnel: the shifted pair b:a
    const bool left = i.has("l");
    return of_sources(i, Ternary([left](uint64_t a, uint64_t b, uint64_t n) {
                        const uint64_t both = a | b << 32;
                        return left ? both << (n & 31) >> 32 : both >> (n & 31);
                      }));
  }
  if (name == "lop3") {
    const uint64_t table = i.args.at(4).bits;
    return of_sources(i, Ternary([table](uint64_t a, uint64_t b, uint64_t c) {
                        uint64_t result = 0;
                        for (int n = 0; n < 32; ++n) {
                          const uint64_t row = (a >> n & 1) << 2 | (b >> n & 1) << 1 | (c >> n & 1);
                          result |= (table >> row & 1) << n;
                        }
                        return result;
                      }));
  }
  return {};
}

Action integer_arithmetic(const Instruction& i) {
  const std::string& name = i.op[0];
  if (name == "mul" || name == "mad") return multiply(i);
  if (name == "div" || name == "rem") return divide(i, name == "rem");
  if (name == "shl" || name == "shr") return shift(i);
  if (name == "and" || name == "or" || name == "xor" || name == "not") return logic(i);
  if (name == "min" || name == "max") {
    expect(i, {});
    const bool max = name == "max";
    return integer_binary(i,
                          [max](auto a, auto b) { return max ? std::max(a, b) : std::min(a, b); });
  }
  if (name == "add" || name == "sub") {
    expect(i, {});
    const bool add = name == "add";
    return of_sources(i, Binary([add](uint64_t a, uint64_t b) { return add ? a + b : a - b; }));
  }
  if (name == "neg") return of_sources(i, Unary([](uint64_t a) { return -a; }));
  if (name == "abs") {
    const int bits = type_of(i).bits;
    return of_sources(i, Unary([bits](uint64_t a) {
                        const int64_t s = sign_extend(a, bits);
                        return uint64_t(s < 0 ? -s : s);
                      }));
  }
  return bit_operation(i);
}

// ---- Comparison and selection

template <typename T>
bool compare(const std::string& how, T a, T b) {
  if (how == "eq") return a == b;
  if (how == "ne") return a != b;
  if (how == "lt" || how == "lo") return a < b;
  if (how == "le" || how == "ls") return a <= b;
  if (how == "gt" || how == "hi") return a > b;
  return a >= b;
}

template <typename T>
bool compare_floats(const std::string& how, T a, T b) {
  const bool unordered = std::isnan(a) || std::isnan(b);
  if (how == "nan") return unordered;
  if (how == "num") return !unordered;
  const bool counts_unordered = how.size() == 3;  // ltu and the like
  return unordered ? counts_unordered : compare(how.substr(0, 2), a, b);
}

bool compare_bits(const std::string& how, Type t, uint64_t a, uint64_t b) {
  if (t.is_float() && t.bits == 32) return compare_floats(how, float_of(a), float_of(b));
  if (t.is_float()) return compare_floats(how, double_of(a), double_of(b));
  if (t.is_signed()) return compare(how, sign_extend(a, t.bits), sign_extend(b, t.bits));
  return compare(how, a, b);
}

Action set_predicate(const Instruction& i) {
  expect(i, {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "lo",  "ls",  "hi", "hs", "equ",
             "neu", "ltu", "leu", "gtu", "geu", "num", "nan", "and", "or", "xor"});
  const Type t = type_of(i);
  if (t.is_float() && t.bits == 16) throw Unsupported(i.text);
  const std::string how = i.op.at(1), with = i.op.size() > 3 ? i.op[2] : "";
  const bool pair = i.args.at(0).kind == OperandKind::kVector;
  const Operand yes = pair ? i.args[0].parts.at(0) : i.args[0];
  const Operand no = pair ? i.args[0].parts.at(1) : Operand{};
  const Operand other = with.empty() ? Operand{} : i.args.at(3);
  return lanes([=, a = i.args.at(1), b = i.args.at(2)](Warp& w, int lane) {
    const bool result = compare_bits(how, t, w.get(a, lane, t), w.get(b, lane, t));
    const bool c = with.empty() ? true : w.get(other, lane) != 0;
    const auto joined = [&](bool r) {
      return with == "or" ? r || c : with == "xor" ? r != c : r && c;
    };
    w.put(yes, lane, joined(result));
    w.put(no, lane, joined(!result));
  });
}

Action select(const Instruction& i) {
  const Type t = type_of(i);
  return lanes([=, d = i.args.at(0), a = i.args.at(1), b = i.args.at(2), p = i.args.at(3)](
                   Warp& w, int lane) { w.put(d, lane, w.get(w.get(p, lane) ? a : b, lane, t)); });
}

Action move(const Instruction& i) {
  const Type t = type_of(i);
  const Operand d = i.args.at(0), a = i.args.at(1);
  if (a.kind == OperandKind::kVector) {  // pack
    const int bits = t.bits / static_cast<int>(a.parts.size());
    return lanes([=](Warp& w, int lane) {
      uint64_t whole = 0;
      for (size_t n = 0; n < a.parts.size(); ++n) {
        whole |= low_bits(w.get(a.parts[n], lane), bits) << (n * size_t(bits));
      }
      w.put(d, lane, whole);
    });
  }
  if (d.kind == OperandKind::kVector) {  // unpack
    const int bits = t.bits / static_cast<int>(d.parts.size());
    return lanes([=](Warp& w, int lane) {
      const uint64_t whole = w.get(a, lane, t);
      for (size_t n = 0; n < d.parts.size(); ++n) {
        w.put(d.parts[n], lane, low_bits(whole >> (n * size_t(bits)), bits));
      }
    });
  }
  return of_sources(i, Unary([](uint64_t value) { return value; }));
}

}  // namespace

Action bind_arithmetic(const Instruction& i) {
  const std::string& name = i.op[0];
  if (name == "setp") return set_predicate(i);
  if (name == "selp") return select(i);
  if (name == "mov") return move(i);
  if (i.op.size() < 2 || !is_type(i.op.back())) return {};
  return type_of(i).is_float() ? float_arithmetic(i) : integer_arithmetic(i);
}

}  // namespace sim::ptx
