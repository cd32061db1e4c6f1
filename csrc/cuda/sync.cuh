// Order between ranks: the only file with memory orders and inline assembly.
//
// Every rank has an array of flags, one 64-bit epoch for each rank, in memory that all ranks map.
// Rank r tells rank k that it has come to epoch e by storing e in k's flags[r]; nobody else writes
// there. Epochs only grow and are waited for with >=, so a flag is never reset, a rank that is
// ahead does no harm, and a store that is seen late is not missed.
//
// What makes data visible: all writes of earlier kernels on the stream come before the store of the
// flag, because it is a release at system scope; a load at system scope that acquires and sees the
// epoch comes before all reads of later kernels. So a kernel that consists of store_release to
// every peer and a wait by load_acquire is a barrier that also publishes data, and no other kernel
// needs an order of its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fsdpx::cuda {

__device__ __forceinline__ void store_release_system(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// Nanoseconds of a clock that all threads of a device share.
__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

}  // namespace fsdpx::cuda
