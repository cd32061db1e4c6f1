// An interpreter for the PTX that nvcc makes of memory-bound kernels: a warp at a time, every
// access checked. What is outside its subset raises Unsupported; what a kernel does wrong raises
// Wrong.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace sim::ptx {

struct Unsupported : std::runtime_error {
  explicit Unsupported(const std::string& what)
      : std::runtime_error("the simulation does not know `" + what + "`") {}
};
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kLanes = 32;
// Generic addresses of shared memory and of kernel parameters; global memory has its real address.
constexpr uint64_t kSharedBase = 0x1F0000000000, kParameterBase = 0x1E0000000000;

// ---- Code

enum class OperandKind { kRegister, kImmediate, kSpecial, kAddress, kVector, kLabel, kSink };
enum class Special {
  kTid,  // x, y, z follow each other
  kNtid = kTid + 3,
  kCtaid = kNtid + 3,
  kNctaid = kCtaid + 3,
  kLane = kNctaid + 3,
  kWarp,
  kClock,
  kZero
};

struct Operand {
  OperandKind kind = OperandKind::kSink;
  bool inverted = false;  // !predicate
  int index = -1;         // of the register, or a Special
  uint64_t bits = 0;      // value of an immediate (a symbol is its offset), offset of an address
  std::string name;       // of a label
  std::vector<Operand> parts;  // elements of a vector or a pair; base of an address
};

class Warp;
using Action = std::function<void(Warp&, uint32_t active)>;

enum class Flow { kNext, kBranch, kReturn, kBarrier };

struct Instruction {
  std::string text;
  std::vector<std::string> op;  // the opcode and its modifiers
  std::vector<Operand> args;
  int predicate = -1;
  bool negated = false;
  Flow flow = Flow::kNext;
  int target = -1;
  Action action;

  bool has(const char* modifier) const;
};

struct Parameter {
  size_t offset, size;
};

// A kernel; its body is parsed at the first launch, so that what one kernel uses does not keep the
// others of a module from running.
struct Kernel {
  std::string name, body;
  std::vector<Parameter> parameters;
  std::map<std::string, uint64_t> symbols;  // offsets of parameters and shared variables
  size_t shared_bytes = 0;
  unsigned max_threads = 1024;
  std::vector<Instruction> code;
  std::vector<int> register_bits;

  void parse();
};

// The kernels of a module by name, and the largest .target in front of them.
using Module = std::map<std::string, Kernel>;
Module parse_module(const std::string& text);

// Gives an instruction its action, or throws Unsupported.
void bind(Instruction& instruction, const Kernel& kernel);
Action bind_arithmetic(const Instruction& instruction);
Action bind_conversion(const Instruction& instruction);
Action bind_memory(const Instruction& instruction);
Action bind_warp_operation(const Instruction& instruction);

// "u", "s", "b", "f" and bits; "p" and 1 for predicates.
struct Type {
  char kind;
  int bits;
  bool is_float() const { return kind == 'f'; }
  bool is_signed() const { return kind == 's'; }
};
bool is_type(const std::string& modifier);
Type type_of(const Instruction& instruction, int from_the_end = 1);
// Refuses modifiers other than `known` between the opcode and the last `types` modifiers.
void expect(const Instruction& instruction, std::initializer_list<const char*> known,
            int types = 1);

inline uint64_t low_bits(uint64_t value, int bits) {
  return bits >= 64 ? value : value & ((uint64_t(1) << bits) - 1);
}
inline int64_t sign_extend(uint64_t value, int bits) {
  return static_cast<int64_t>(value << (64 - bits)) >> (64 - bits);
}

// ---- Execution

struct Dim {
  unsigned x, y, z;
  size_t count() const { return size_t(x) * y * z; }
};

// What the accesses of one kind cost; sectors are those of 32 bytes, per warp.
struct Traffic {
  uint64_t threads = 0, bytes = 0, requests = 0, sectors = 0;
};
struct AccessKind {
  std::string kernel, op;
  int width;
  auto operator<=>(const AccessKind&) const = default;
};
extern std::map<AccessKind, Traffic>& traffic;

class Block;

class Warp {
 public:
  Warp(Block& block, int index, int num_threads);
  // Runs until all lanes have ended or wait at a barrier, or until the warp seems to spin.
  void run();
  bool ended() const { return live == 0; }
  bool at_barrier() const { return live != 0 && (live & ~waiting) == 0; }
  void release();

  uint64_t get(const Operand& operand, int lane) const;
  uint64_t get(const Operand& operand, int lane, Type type) const {
    return low_bits(get(operand, lane), type.bits);
  }
  void put(const Operand& operand, int lane, uint64_t value);
  [[noreturn]] void fail(const std::string& what, const Instruction& instruction, int lane,
                         uint64_t address) const;

  Block& block;
  const int index;        // in the block
  uint32_t exists, live;  // lanes that the block has; that have not returned
  uint32_t waiting = 0;   // at a barrier
  int polls = 0;          // loads that may wait for another thread, since run() began
  bool progressed = false;

 private:
  uint64_t special(Special which, int axis, int lane) const;
  void branch(const Instruction& instruction, int pc, uint32_t active, uint32_t chosen);

  std::array<int, kLanes> pcs{};
  std::vector<uint64_t> registers;  // [register][lane]
};

class Launch;

// Who touched a byte of shared memory last, and after how many barriers.
struct Touch {
  int warp = -1;
  uint32_t barriers = 0;
};

class Block {
 public:
  Block(Launch& launch, unsigned index);
  // True when all threads have returned, false when all of them wait for something outside.
  bool run();

  Launch& launch;
  const unsigned index;
  std::vector<char> shared;
  std::vector<Touch> shared_writes, shared_reads;
  uint32_t barriers = 0;
  uint32_t ordered = 0;  // the launch's clock at the last barrier or fence of this block

 private:
  std::vector<Warp> warps;
};

// One launch of a kernel.
class Launch {
 public:
  Launch(const Kernel& kernel, Dim grid, Dim threads, std::string arguments);
  // Runs what can run. True when the kernel has ended, false when what is left of it spins.
  bool run();
  uint32_t now() const { return clock; }
  uint32_t tick() { return ++clock; }

  const Kernel& kernel;
  const Dim grid, threads;
  const std::string arguments;
  const uint64_t number;  // of this launch in the process
  uint64_t moved = 0;     // bytes of global memory
  // Per block, the clock when it last made its writes visible, and last looked at those of others.
  std::vector<uint32_t> released, acquired;
  // Called for every instruction of a warp; throws when they are too many for the time limit.
  void step() {
    if (++steps % kStepsBetweenLooks == 0) check_time();
  }

 private:
  static constexpr uint64_t kStepsBetweenLooks = 1 << 16;
  void check_time() const;

  uint64_t steps = 0;
  const double started;
  uint32_t clock = 1;
  unsigned next_block = 0;
  std::vector<std::unique_ptr<Block>> resident;
};

}  // namespace sim::ptx
