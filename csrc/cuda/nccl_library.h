// NCCL, found at run time: fsdpx does not link it, and works without it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace fsdpx::cuda::nccl {

// As in nccl.h, whose values never change.
using Comm = struct Opaque*;
using Result = int;
struct UniqueId {
  char bytes[128];
};
enum DataType : int { kInt8 = 0, kFloat16 = 6, kFloat32 = 7, kFloat64 = 8, kBFloat16 = 9 };
enum RedOp : int { kSum = 0 };
inline constexpr Result kSuccess = 0;
inline constexpr Result kInProgress = 7;

// The first version that has all of the following.
inline constexpr int kMinVersion = 21800;

struct Library {
  Result (*ncclGetVersion)(int* version);
  const char* (*ncclGetErrorString)(Result result);
  const char* (*ncclGetLastError)(Comm comm);
  Result (*ncclGetUniqueId)(UniqueId* id);
  Result (*ncclCommInitRank)(Comm* comm, int num_ranks, UniqueId id, int rank);
  Result (*ncclCommSplit)(Comm comm, int color, int key, Comm* made, void* config);
  Result (*ncclCommAbort)(Comm comm);
  Result (*ncclCommGetAsyncError)(Comm comm, Result* error);
  Result (*ncclGroupStart)();
  Result (*ncclGroupEnd)();
  Result (*ncclAllGather)(const void* send, void* recv, size_t count, DataType type, Comm comm,
                          cudaStream_t stream);
  Result (*ncclReduceScatter)(const void* send, void* recv, size_t count, DataType type, RedOp op,
                              Comm comm, cudaStream_t stream);
  Result (*ncclAllReduce)(const void* send, void* recv, size_t count, DataType type, RedOp op,
                          Comm comm, cudaStream_t stream);
  int version = 0;

  void check(Result result, const char* what, Comm comm = nullptr) const;  // throws runtime_error
};

// Loaded at the first call: what the process has already (torch brings one), else libnccl.so.2, or
// what the environment variable FSDPX_NCCL_LIBRARY names. Throws std::runtime_error that says what
// is missing or too old, every time.
const Library& library();

}  // namespace fsdpx::cuda::nccl
