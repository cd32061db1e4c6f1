// The barrier kernel.
#include <cuda_runtime.h>

#include "barrier.h"
#include "launch.h"
#include "sync.cuh"

namespace fsdpx::cuda {
namespace {

// How often a flag is read between two looks at the clock and at the host's memory, which is much
// farther away.
constexpr uint32_t kPollsBetweenLooks = 64;

// Thread k deals with rank k. Barriers of one stream follow each other, so of those who give up
// only threads of one block may want to write the error at the same time; the host's memory may
// have no atomics, and the host must not see half of it.
__global__ void __launch_bounds__(kMaxRanks)
    barrier_kernel(const __grid_constant__ Barrier barrier, uint64_t epoch, bool waits) {
  __shared__ uint32_t num_missing;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer == 0) num_missing = 0;
  __syncthreads();
  if (peer >= barrier.num_ranks) return;
  store_release_system(barrier.peers[peer] + barrier.rank, epoch);
  if (!waits) return;
  const uint64_t* flag = barrier.peers[barrier.rank] + peer;
  const uint64_t begin = global_nanoseconds();
  for (uint32_t polls = 1;; ++polls) {
    const uint64_t counter = load_acquire_system(flag);
    if (counter >= epoch) return;
    if (polls % kPollsBetweenLooks != 0) continue;
    const bool late = global_nanoseconds() - begin > barrier.nanoseconds;
    if (!late && load_acquire_system(barrier.abort) == 0) continue;
    if (atomicAdd(&num_missing, 1u) == 0 && load_acquire_system(&barrier.error->failed) == 0) {
      barrier.error->rank = static_cast<uint64_t>(peer);
      barrier.error->counter = counter;
      barrier.error->target = epoch;
      store_release_system(&barrier.error->failed, late ? 1 : 2);
    }
    return;
  }
}

void launch(const Barrier& barrier, uint64_t epoch, bool waits, void* stream) {
  check(barrier.num_ranks >= 1 && barrier.num_ranks <= kMaxRanks && barrier.rank >= 0 &&
            barrier.rank < barrier.num_ranks,
        "CUDA barrier: rank ", barrier.rank, " of ", barrier.num_ranks, "; at most ", kMaxRanks,
        " ranks can meet");
  barrier_kernel<<<1, kMaxRanks, 0, static_cast<cudaStream_t>(stream)>>>(barrier, epoch, waits);
  check_launch("barrier");
}

}  // namespace

void signal_and_wait(const Barrier& barrier, uint64_t epoch, void* stream) {
  launch(barrier, epoch, true, stream);
}

void signal(const Barrier& barrier, uint64_t epoch, void* stream) {
  launch(barrier, epoch, false, stream);
}

}  // namespace fsdpx::cuda
