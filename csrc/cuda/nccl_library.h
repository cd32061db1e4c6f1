// NCCL, found at run time: fsdpx does not link it, and works without it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <limits>
#include <string>

namespace fsdpx::cuda::nccl {

// As in nccl.h, whose values never change.
using Comm = struct Opaque*;
using Window = struct OpaqueWindow*;
using Result = int;
struct UniqueId {
  char bytes[128];
};
enum DataType : int { kInt8 = 0, kFloat16 = 6, kFloat32 = 7, kFloat64 = 8, kBFloat16 = 9 };
enum RedOp : int { kSum = 0 };
inline constexpr Result kSuccess = 0;
inline constexpr Result kInProgress = 7;

// The first version that has all of the following but memory, and windows of it.
inline constexpr int kMinVersion = 21800;
inline constexpr int kMinVersionOfMemory = 21900;
inline constexpr int kMinVersionOfWindows = 22900;

// ncclConfig_t as it was in kMinVersion: NCCL takes older ones, by their size and version.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kMinVersion;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;

 private:
  static constexpr int kUndefined = std::numeric_limits<int>::min();
};

struct Library {
  Result (*ncclGetVersion)(int* version);
  const char* (*ncclGetErrorString)(Result result);
  const char* (*ncclGetLastError)(Comm comm);
  Result (*ncclGetUniqueId)(UniqueId* id);
  Result (*ncclCommInitRankConfig)(Comm* comm, int num_ranks, UniqueId id, int rank,
                                   Config* config);
  Result (*ncclCommSplit)(Comm comm, int color, int key, Comm* made, Config* config);
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
  // Null where has_memory() is false.
  Result (*ncclMemAlloc)(void** data, size_t nbytes);
  Result (*ncclMemFree)(void* data);
  Result (*ncclCommRegister)(Comm comm, void* data, size_t nbytes, void** handle);
  Result (*ncclCommDeregister)(Comm comm, void* handle);
  // Null where has_windows() is false.
  Result (*ncclCommWindowRegister)(Comm comm, void* data, size_t nbytes, Window* window, int flags);
  Result (*ncclCommWindowDeregister)(Comm comm, Window window);
  Result (*ncclGetPeerDevicePointer)(Window window, size_t offset, int peer, void** data);
  int version = 0;

  bool has_memory() const { return ncclCommDeregister != nullptr; }
  bool has_windows() const { return has_memory() && ncclGetPeerDevicePointer != nullptr; }
  std::string version_text() const;
  void check(Result result, const char* what, Comm comm = nullptr) const;  // throws runtime_error
};

// Loaded at the first call: what the process has already (torch brings one), else libnccl.so.2, or
// what the environment variable FSDPX_NCCL_LIBRARY names. Throws std::runtime_error that says what
// is missing or too old, every time.
const Library& library();

}  // namespace fsdpx::cuda::nccl
