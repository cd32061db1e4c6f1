// A barrier of ranks on their streams, through flags in each other's memory; see sync.cuh.
#pragma once

#include <cstdint>

namespace fsdpx::cuda {

inline constexpr int kMaxRanks = 128;

// Why a barrier ended without all ranks, written to memory that the host reads (pinned).
struct BarrierError {
  uint64_t failed;   // 0: nothing went wrong; written last
  uint64_t rank;     // the rank that was missing
  uint64_t counter;  // its epoch
  uint64_t target;   // the epoch that was waited for
};

struct Barrier {
  uint64_t* peers[kMaxRanks];  // the flags of each rank, kMaxRanks epochs
  int32_t num_ranks;
  int32_t rank;           // this one
  uint64_t nanoseconds;   // limit of the wait
  BarrierError* error;    // first failure only
  const uint64_t* abort;  // not zero: do not wait (any more). Host memory.
};

// Enqueues: tells every rank that this one has come to `epoch`, and waits for all to come to it.
// When the limit passes, writes `error` and ends, so that the stream goes on; the caller must not
// use what it then finds.
void signal_and_wait(const Barrier& barrier, uint64_t epoch, void* stream);

// The first half alone: what this rank's stream did before is done, and nobody waits here.
void signal(const Barrier& barrier, uint64_t epoch, void* stream);

}  // namespace fsdpx::cuda
