// Loads, stores and atomics, and the checks of every access.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "ptx.h"
#include "sim.h"

namespace sim::ptx {

std::map<AccessKind, Traffic>& traffic = *new std::map<AccessKind, Traffic>;

namespace {

enum class Space { kGlobal, kShared, kParameter, kGeneric };

struct Access {
  Space space = Space::kGeneric;
  Type type{'b', 32};
  int elements = 1;
  bool write = false;
  bool strong = false;  // volatile, atomic or ordered: made for data that others change
  bool acquire = false, release = false;
  bool read_only = false;  // ld.global.nc
  int bytes() const { return type.bits / 8 * elements; }
};

Access access_of(const Instruction& i) {
  Access a;
  for (size_t at = 1; at < i.op.size(); ++at) {
    const std::string& m = i.op[at];
    if (m == "global") a.space = Space::kGlobal;
    if (m == "shared" || m == "shared__cta") a.space = Space::kShared;
    if (m == "param") a.space = Space::kParameter;
    if (m == "v2" || m == "v4" || m == "v8") a.elements = m[1] - '0';
    if (m == "nc") a.read_only = true;
    if (m == "acquire" || m == "acq_rel") a.acquire = a.strong = true;
    if (m == "release" || m == "acq_rel") a.release = a.strong = true;
    if (m == "volatile" || m == "relaxed" || m == "mmio") a.strong = true;
    if (m == "local" || m == "const") throw Unsupported(i.text);
  }
  a.type = type_of(i);
  return a;
}

constexpr unsigned kLaunches = 1u << 20, kBlocks = 1u << 16;  // then numbers begin again

// What the last writer, and the last reader, of a byte of global memory leave there.
struct Stamp {
  uint64_t launch : 20, block : 16, warp : 5, time : 23;
};
static_assert(sizeof(Stamp) == 8);

Stamp* stamps_at(char* table, const void* p) {
  return reinterpret_cast<Stamp*>(table) + (static_cast<const char*>(p) - kBase);
}
Stamp* writers(const void* p) {
  static char* const table = reserve(kSlots * kStride * sizeof(Stamp));
  return stamps_at(table, p);
}
Stamp* readers(const void* p) {
  static char* const table = reserve(kSlots * kStride * sizeof(Stamp));
  return stamps_at(table, p);
}

// Does this warp come after the access `s` of the same launch, by barriers, fences or ordered
// accesses?
bool ordered(const Warp& warp, const Stamp& s) {
  const Launch& launch = warp.block.launch;
  const unsigned mine = warp.block.index & (kBlocks - 1);
  if (s.block == mine) return s.warp == unsigned(warp.index) || s.time < warp.block.ordered;
  return s.block < launch.released.size() && s.time < launch.released[s.block] &&
         s.time < launch.acquired[warp.block.index];
}

void check_global(const Warp& warp, const Instruction& i, const Access& a, int lane, char* p) {
  const uint8_t* state = state_of(p);
  const uint64_t launch = warp.block.launch.number & (kLaunches - 1);
  for (int b = 0; b < a.bytes(); ++b) {
    const uint64_t at = reinterpret_cast<uint64_t>(p);
    if (state[b] == 0) warp.fail("out of bounds (global)", i, lane, at);
    if (!a.write && state[b] == 1) warp.fail("read of memory never written", i, lane, at);
    const Stamp &written = writers(p)[b], &read = readers(p)[b];
    if (a.read_only && written.launch == launch) {
      warp.fail("ld.global.nc of memory written in this launch", i, lane, at);
    }
    if (!a.strong && written.launch == launch && !ordered(warp, written)) {
      warp.fail("race: another thread wrote here in this launch", i, lane, at);
    }
    if (!a.strong && a.write && read.launch == launch && !ordered(warp, read)) {
      warp.fail("race: another thread read here in this launch", i, lane, at);
    }
  }
}

void mark(const Warp& warp, const Access& a, char* p) {
  if (a.write) memset(state_of(p), 2, static_cast<size_t>(a.bytes()));
  if (a.strong) return;
  Launch& launch = warp.block.launch;
  Stamp s;
  s.launch = launch.number & (kLaunches - 1);
  s.block = warp.block.index & (kBlocks - 1);
  s.warp = static_cast<uint64_t>(warp.index);
  s.time = launch.now() & ((1u << 23) - 1);
  std::fill_n(a.write ? writers(p) : readers(p), a.bytes(), s);
}

char* global(const Warp& warp, const Instruction& i, const Access& a, int lane, uint64_t address) {
  char* p = reinterpret_cast<char*>(address);
  if (!on_device(p)) {
    if (!is_pinned(p, static_cast<size_t>(a.bytes()))) {
      warp.fail("out of bounds (global)", i, lane, address);
    }
    return p;
  }
  check_global(warp, i, a, lane, p);
  mark(warp, a, p);
  return p;
}

char* shared(const Warp& warp, const Instruction& i, const Access& a, int lane, uint64_t offset) {
  Block& block = warp.block;
  if (offset + static_cast<uint64_t>(a.bytes()) > block.shared.size()) {
    warp.fail("out of bounds (shared)", i, lane, offset);
  }
  for (size_t b = offset; b < offset + static_cast<size_t>(a.bytes()); ++b) {
    const auto races = [&](const Touch& t) {
      return t.warp >= 0 && t.warp != warp.index && t.barriers == block.barriers;
    };
    if (!a.write && block.shared_writes[b].warp < 0) {
      warp.fail("read of shared memory never written", i, lane, offset);
    }
    if (!a.strong && (races(block.shared_writes[b]) || (a.write && races(block.shared_reads[b])))) {
      warp.fail("race in shared memory: no barrier since the other warp's access", i, lane, offset);
    }
    (a.write ? block.shared_writes : block.shared_reads)[b] = {warp.index, block.barriers};
  }
  return block.shared.data() + offset;
}

uint64_t address_of(const Warp& warp, const Operand& operand, int lane) {
  return warp.get(operand.parts[0], lane) + operand.bits;
}

// Where an access of a lane goes, after the checks.
char* locate(const Warp& warp, const Instruction& i, const Access& a, int lane, uint64_t address) {
  if (address % static_cast<uint64_t>(a.bytes())) {
    warp.fail("misaligned access", i, lane, address);
  }
  const bool generic = a.space == Space::kGeneric;
  const uint64_t window = uint64_t(1) << 32;
  if (a.space == Space::kShared) return shared(warp, i, a, lane, address);
  if (generic && address - kSharedBase < window) {
    return shared(warp, i, a, lane, address - kSharedBase);
  }
  if (a.space == Space::kParameter || (generic && address - kParameterBase < window)) {
    const uint64_t offset = address - (generic ? kParameterBase : 0);
    const std::string& arguments = warp.block.launch.arguments;
    if (a.write || offset + static_cast<uint64_t>(a.bytes()) > arguments.size()) {
      warp.fail("outside the kernel's arguments", i, lane, offset);
    }
    return const_cast<char*>(arguments.data()) + offset;
  }
  return global(warp, i, a, lane, address);
}

// The addresses of a warp's access to global memory.
struct Addresses {
  std::array<uint64_t, kLanes> at{};
  size_t size = 0;
  bool contains(uint64_t address) const {
    return std::find(at.begin(), at.begin() + size, address) != at.begin() + size;
  }
};

void count(Warp& warp, const Instruction& i, const Access& a, const Addresses& addresses) {
  Traffic& t = traffic[{warp.block.launch.kernel.name, i.op[0], a.bytes()}];
  std::array<uint64_t, kLanes> sectors = addresses.at;
  const auto end = sectors.begin() + addresses.size;
  for (auto s = sectors.begin(); s != end; ++s) *s /= 32;
  std::sort(sectors.begin(), end);
  const uint64_t bytes = addresses.size * static_cast<uint64_t>(a.bytes());
  t.threads += addresses.size;
  t.bytes += bytes;
  t.requests += 1;
  t.sectors += static_cast<uint64_t>(std::unique(sectors.begin(), end) - sectors.begin());
  warp.block.launch.moved += bytes;
}

// Calls run(lane, pointer) for the active lanes.
template <typename Run>
void for_lanes(Warp& warp, const Instruction& i, const Access& a, const Operand& where,
               uint32_t active, const Run& run) {
  Addresses addresses;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(active >> lane & 1)) continue;
    const uint64_t address = address_of(warp, where, lane);
    char* const p = locate(warp, i, a, lane, address);
    if (on_device(p)) {
      if (a.write && !a.strong && addresses.contains(address)) {
        warp.fail("two threads store to one address", i, lane, address);
      }
      addresses.at[addresses.size++] = address;
    }
    run(lane, p);
  }
  if (addresses.size) count(warp, i, a, addresses);
}

void synchronise(Warp& warp, bool acquire, bool release) {
  Launch& launch = warp.block.launch;
  if (!acquire && !release) return;
  const uint32_t now = launch.tick();
  if (release) launch.released[warp.block.index] = now;
  if (acquire) launch.acquired[warp.block.index] = now;
  if (acquire && release) warp.block.ordered = now;
}

std::vector<Operand> elements(const Operand& operand) {
  return operand.kind == OperandKind::kVector ? operand.parts : std::vector<Operand>{operand};
}

uint64_t load_bits(const char* p, int bytes, bool strong) {
  uint64_t value = 0;
  if (strong && bytes == 4) return __atomic_load_n(reinterpret_cast<const uint32_t*>(p), 2);
  if (strong && bytes == 8) return __atomic_load_n(reinterpret_cast<const uint64_t*>(p), 2);
  memcpy(&value, p, static_cast<size_t>(bytes));
  return value;
}

void store_bits(char* p, uint64_t value, int bytes, bool strong) {
  if (strong && bytes == 4) {
    __atomic_store_n(reinterpret_cast<uint32_t*>(p), static_cast<uint32_t>(value), 3);
  } else if (strong && bytes == 8) {
    __atomic_store_n(reinterpret_cast<uint64_t*>(p), value, 3);
  } else {
    memcpy(p, &value, static_cast<size_t>(bytes));
  }
}

// Instructions are moved after they are bound, so actions keep what they need of them.
Action bind_load(const Instruction& i) {
  const Access a = access_of(i);
  const std::vector<Operand> targets = elements(i.args.at(0));
  return [=](Warp& warp, uint32_t active) {
    for_lanes(warp, i, a, i.args[1], active, [&](int lane, const char* p) {
      for (size_t e = 0; e < targets.size(); ++e) {
        const int bytes = a.type.bits / 8;
        const uint64_t value = load_bits(p + e * static_cast<size_t>(bytes), bytes, a.strong);
        warp.put(targets[e], lane,
                 a.type.is_signed() ? uint64_t(sign_extend(value, a.type.bits)) : value);
      }
    });
    if (a.strong) ++warp.polls;
    synchronise(warp, a.acquire, false);
  };
}

Action bind_store(const Instruction& i) {
  Access a = access_of(i);
  if (a.space == Space::kParameter) throw Unsupported(i.text);
  a.write = true;
  const std::vector<Operand> sources = elements(i.args.at(1));
  return [=](Warp& warp, uint32_t active) {
    synchronise(warp, false, a.release);
    for_lanes(warp, i, a, i.args[0], active, [&](int lane, char* p) {
      for (size_t e = 0; e < sources.size(); ++e) {
        const int bytes = a.type.bits / 8;
        store_bits(p + e * static_cast<size_t>(bytes), warp.get(sources[e], lane), bytes, a.strong);
      }
    });
  };
}

template <typename T>
uint64_t combine(const std::string& op, T m, T x) {
  T r = op == "add" ? T(m + x) : op == "min" ? std::min(m, x) : op == "max" ? std::max(m, x) : x;
  uint64_t bits = 0;
  memcpy(&bits, &r, sizeof r);
  return bits;
}

uint64_t atomic_result(const std::string& op, Type type, uint64_t old, uint64_t x, uint64_t y) {
  if (op == "cas") return old == low_bits(x, type.bits) ? y : old;
  if (op == "and") return old & x;
  if (op == "or") return old | x;
  if (op == "xor") return old ^ x;
  if (op == "inc") return old >= low_bits(x, type.bits) ? 0 : old + 1;
  if (type.is_float() && type.bits == 32) {
    return combine(op, std::bit_cast<float>(uint32_t(old)), std::bit_cast<float>(uint32_t(x)));
  }
  if (type.is_float()) return combine(op, std::bit_cast<double>(old), std::bit_cast<double>(x));
  if (type.is_signed()) {
    return combine(op, sign_extend(old, type.bits), sign_extend(x, type.bits));
  }
  return combine(op, old, low_bits(x, type.bits));
}

template <typename T>
uint64_t exchange(char* p, const std::function<uint64_t(uint64_t)>& next) {
  T* const word = reinterpret_cast<T*>(p);
  T old = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(word, &old, static_cast<T>(next(old)), false,
                                      __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE)) {
  }
  return old;
}

Action bind_atomic(const Instruction& i) {
  static const char* const known[] = {"add", "min", "max", "exch", "and",
                                      "or",  "xor", "inc", "cas"};
  Access a = access_of(i);
  a.strong = true;
  const auto op = std::find_if(i.op.begin(), i.op.end(), [](const std::string& m) {
    return std::find(std::begin(known), std::end(known), m) != std::end(known);
  });
  if (op == i.op.end() || a.elements > 1 || a.type.bits < 32) throw Unsupported(i.text);
  const size_t first = i.op[0] == "red" ? 0 : 1;  // the address
  const std::string name = *op;
  return [=](Warp& warp, uint32_t active) {
    synchronise(warp, false, true);
    Access written = a;
    written.write = true;
    for_lanes(warp, i, a, i.args[first], active, [&](int lane, char* p) {
      const uint64_t x = warp.get(i.args[first + 1], lane);
      const uint64_t y = name == "cas" ? warp.get(i.args[first + 2], lane) : 0;
      const auto next = [&](uint64_t old) { return atomic_result(name, a.type, old, x, y); };
      locate(warp, i, written, lane, address_of(warp, i.args[first], lane));
      const uint64_t old =
          a.type.bits == 32 ? exchange<uint32_t>(p, next) : exchange<uint64_t>(p, next);
      if (first) warp.put(i.args[0], lane, old);
    });
    ++warp.polls;
    synchronise(warp, true, false);
  };
}

Action bind_fence(const Instruction&) {
  return [](Warp& warp, uint32_t) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    synchronise(warp, true, true);
  };
}

Action bind_address(const Instruction& i) {
  const bool from_generic = i.op.at(1) == "to";
  const std::string space = i.op.at(from_generic ? 2 : 1);
  const uint64_t base = space == "shared" ? kSharedBase : space == "param" ? kParameterBase : 0;
  if (!base && space != "global") throw Unsupported(i.text);
  return [=](Warp& warp, uint32_t active) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(active >> lane & 1)) continue;
      const uint64_t value = warp.get(i.args[1], lane);
      warp.put(i.args[0], lane, from_generic ? value - base : value + base);
    }
  };
}

}  // namespace

Action bind_memory(const Instruction& i) {
  const std::string& name = i.op[0];
  if (name == "ld" || name == "ldu") return bind_load(i);
  if (name == "st") return bind_store(i);
  if (name == "atom" || name == "red") return bind_atomic(i);
  if (name == "membar" || name == "fence") return bind_fence(i);
  if (name == "cvta") return bind_address(i);
  if (name == "prefetch" || name == "applypriority" || name == "discard") {
    return [](Warp&, uint32_t) {};
  }
  return {};
}

}  // namespace sim::ptx
