// Where the ranks of a simulated NCCL communicator meet: in shared memory when they are in
// different processes.
//
// A collective announces itself when it gets to the front of its stream: it copies its input to
// staging space and says what it is and when it could start. Once all ranks have announced, each
// rank finishes on its own from the copies, so no rank has to wait for another one to be driven.
// All ranks start at the latest announced time.
#pragma once
#include <nccl.h>

#include "sim.h"

namespace sim::nccl {

constexpr int kRanks = kSlots, kRing = 4, kSplits = 64, kWindows = 256;

struct Post {                    // what a rank announces about its k-th collective
  std::atomic<uint64_t> number;  // k, written last
  char call[120];
  const char* input;
  double ready_us;
};
struct SplitPost {
  std::atomic<int> posted;
  int color, key;
};
struct WindowPost {
  std::atomic<int> number;  // of the window, plus one: places are used again
  char* base;
  size_t size;
};
struct Room {                       // all zero at first
  std::atomic<int> joined[kRanks];  // slot of the rank's process, plus one
  std::atomic<int> failed;          // ncclResult_t: the ranks' calls did not match
  Post posts[kRanks][kRing];
  SplitPost splits[kSplits][kRanks];
  WindowPost windows[kWindows][kRanks];
};

ncclResult_t fail(ncclResult_t code, const std::string& text);
extern std::string& last_text;
// The ranks below n that are not here, as text.
std::string missing(int n, const std::function<bool(int)>& here);
// Waits until `here` is true for all ranks, and then calls `finish`. With a communicator that does
// not block this is what later queries of its state do.
ncclResult_t when_all(ncclComm* c, int n, const std::string& what,
                      const std::function<bool(int)>& here,
                      const std::function<ncclResult_t()>& finish);
// In one process the ranks enter one after the other; between processes, entering waits for all.
ncclResult_t enter(ncclComm* c);
// ncclSuccess when the communicator can be used. One from ncclCommSplit learns its ranks here.
ncclResult_t check(ncclComm* c);

}  // namespace sim::nccl

struct ncclComm {
  std::string id;
  int n, rank, dev;
  sim::nccl::Room* room = nullptr;
  uint64_t issued = 0, finished = 0;  // collectives that the host called; that are done
  std::vector<char*> inputs = std::vector<char*>(sim::nccl::kRing, nullptr);
  int splits = 0, windows = 0;  // how many were made
  // With the counts of their memory.
  std::map<int, std::atomic<int>*> open_windows = {};
  std::map<void*, std::atomic<int>*> registered = {};
  ncclComm* parent = nullptr;  // set until a split is resolved, which needs all ranks' colors
  int split_number = 0, color = 0, key = 0;
  bool aborted = false, destroyed = false;
  bool blocking = true;
  std::function<ncclResult_t()> pending = {};  // of one that does not block: the call under way
  ncclResult_t state = ncclSuccess;            // of that call
  std::vector<float> premul;                   // scalars of ncclRedOpCreatePreMulSum
};
struct ncclWindow_vidmem {
  ncclComm* comm;
  int number;
  char* base;
};

#define CHECK_COMM(c)                                  \
  do {                                                 \
    const ncclResult_t checked_ = sim::nccl::check(c); \
    if (checked_ != ncclSuccess) return checked_;      \
  } while (0)
