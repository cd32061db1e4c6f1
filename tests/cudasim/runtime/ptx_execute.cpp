// Warps, blocks and launches: which instruction runs next, and for which lanes.
#include <time.h>

#include <algorithm>
#include <bit>

#include "ptx.h"
#include "sim.h"

namespace sim::ptx {
namespace {

constexpr int kPollsOfASpin = 32;       // that make a warp let the others run
constexpr size_t kResidentBlocks = 64;  // that run in turns when they wait for each other

uint64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

unsigned axis_of(Dim dim, int axis) { return axis == 0 ? dim.x : axis == 1 ? dim.y : dim.z; }

// The coordinate of the item with number `index`.
unsigned coordinate(Dim dim, size_t index, int axis) {
  const size_t below = axis == 0 ? 1 : axis == 1 ? dim.x : size_t(dim.x) * dim.y;
  return static_cast<unsigned>(index / below % axis_of(dim, axis));
}

uint64_t next_launch() {
  static uint64_t count = 0;
  return ++count;
}

}  // namespace

// ---- Warps

Warp::Warp(Block& owner, int number, int num_threads) : block(owner), index(number) {
  const int lanes = std::min(kLanes, num_threads - number * kLanes);
  exists = live = static_cast<uint32_t>(low_bits(~uint64_t(0), lanes));
  registers.resize(owner.launch.kernel.register_bits.size() * kLanes);
}

uint64_t Warp::special(Special which, int axis, int lane) const {
  const Launch& launch = block.launch;
  const size_t thread = static_cast<size_t>(index * kLanes + lane);
  switch (which) {
    case Special::kTid:
      return coordinate(launch.threads, thread, axis);
    case Special::kNtid:
      return axis_of(launch.threads, axis);
    case Special::kCtaid:
      return coordinate(launch.grid, block.index, axis);
    case Special::kNctaid:
      return axis_of(launch.grid, axis);
    case Special::kLane:
      return static_cast<uint64_t>(lane);
    case Special::kWarp:
      return static_cast<uint64_t>(index);
    case Special::kClock:
      return nanoseconds();
    default:
      return 0;
  }
}

uint64_t Warp::get(const Operand& operand, int lane) const {
  switch (operand.kind) {
    case OperandKind::kRegister: {
      const uint64_t value = registers[static_cast<size_t>(operand.index) * kLanes + lane];
      return operand.inverted ? !value : value;
    }
    case OperandKind::kImmediate:
      return operand.bits;
    case OperandKind::kSpecial: {
      const int i = operand.index;
      const bool has_axis = i < static_cast<int>(Special::kLane);
      return special(static_cast<Special>(has_axis ? i / 3 * 3 : i), has_axis ? i % 3 : 0, lane);
    }
    default:
      throw Unsupported("operand " + operand.name);
  }
}

void Warp::put(const Operand& operand, int lane, uint64_t value) {
  if (operand.kind == OperandKind::kSink) return;
  const size_t r = static_cast<size_t>(operand.index);
  registers[r * kLanes + lane] = low_bits(value, block.launch.kernel.register_bits[r]);
}

void Warp::fail(const std::string& what, const Instruction& instruction, int lane,
                uint64_t address) const {
  char where[120];
  snprintf(where, sizeof where, "`, address %#llx, block %u, thread %d",
           static_cast<unsigned long long>(address), block.index, index * kLanes + lane);
  throw Wrong(what + ": `" + instruction.text + where);
}

void Warp::branch(const Instruction& instruction, int pc, uint32_t active, uint32_t chosen) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(active >> lane & 1)) continue;
    pcs[lane] =
        chosen >> lane & 1 && instruction.flow == Flow::kBranch ? instruction.target : pc + 1;
  }
  if (instruction.flow == Flow::kReturn) live &= ~chosen;
  if (instruction.flow == Flow::kBarrier) waiting |= chosen;
}

// The lanes at the lowest address run first, which brings structured code together again.
void Warp::run() {
  const std::vector<Instruction>& code = block.launch.kernel.code;
  polls = 0;
  progressed = false;
  while (const uint32_t runnable = live & ~waiting) {
    int pc = INT32_MAX;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (runnable >> lane & 1) pc = std::min(pc, pcs[lane]);
    }
    uint32_t active = 0;
    for (bool together = true; together;) {
      for (int lane = 0; active != runnable && lane < kLanes; ++lane) {
        if ((runnable & ~active) >> lane & 1 && pcs[lane] == pc) active |= uint32_t(1) << lane;
      }
      const Instruction& i = code[pc];
      uint32_t chosen = active;
      for (int lane = 0; i.predicate >= 0 && lane < kLanes; ++lane) {
        const bool set = registers[static_cast<size_t>(i.predicate) * kLanes + lane] != 0;
        if (set == i.negated) chosen &= ~(uint32_t(1) << lane);
      }
      block.launch.step();
      together = i.flow == Flow::kNext;
      if (together) {
        if (chosen) i.action(*this, chosen);
        ++pc;
      } else {
        branch(i, pc, active, chosen);
      }
    }
    if (polls > kPollsOfASpin) return;
    progressed = true;
  }
}

void Warp::release() { waiting = 0; }

// ---- Blocks

Block::Block(Launch& owner, unsigned number)
    : launch(owner),
      index(number),
      shared(owner.kernel.shared_bytes),
      shared_writes(shared.size()),
      shared_reads(shared.size()) {
  const int num_threads = static_cast<int>(owner.threads.count());
  for (int w = 0; w * kLanes < num_threads; ++w) warps.emplace_back(*this, w, num_threads);
}

bool Block::run() {
  for (;;) {
    bool moved = false, all_ended = true, all_stopped = true;
    for (Warp& warp : warps) {
      if (!warp.ended() && !warp.at_barrier()) {
        warp.run();
        moved |= warp.progressed;
      }
      all_ended &= warp.ended();
      all_stopped &= warp.ended() || warp.at_barrier();
    }
    if (all_ended) return true;
    if (all_stopped) {
      ++barriers;
      ordered = launch.tick();
      for (Warp& warp : warps) warp.release();
    } else if (!moved || std::any_of(warps.begin(), warps.end(),
                                     [](const Warp& w) { return w.polls > kPollsOfASpin; })) {
      return false;
    }
  }
}

// ---- Launches

Launch::Launch(const Kernel& code, Dim blocks, Dim per_block, std::string raw)
    : kernel(code),
      grid(blocks),
      threads(per_block),
      arguments(std::move(raw)),
      number(next_launch()),
      released(blocks.count()),
      acquired(blocks.count()),
      started(now_s()) {}

void Launch::check_time() const {
  if (now_s() - started < settings.timeout_s) return;
  throw Wrong("it ran longer than the limit of " + std::to_string(int(settings.timeout_s)) + " s");
}

bool Launch::run() {
  do {
    if (next_block < grid.count() && resident.size() < kResidentBlocks) {
      resident.push_back(std::make_unique<Block>(*this, next_block++));
    }
    const size_t before = resident.size();
    std::erase_if(resident, [](const std::unique_ptr<Block>& block) { return block->run(); });
    if (resident.size() == before && (next_block == grid.count() || before == kResidentBlocks)) {
      return false;
    }
  } while (!resident.empty() || next_block < grid.count());
  return true;
}

}  // namespace sim::ptx
