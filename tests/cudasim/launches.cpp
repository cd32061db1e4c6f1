// A stand-in for the CUDA runtime, for tests only: it launches nothing, but hands every launch of
// csrc/cuda/kernels.cu to a callback, which gives it to the simulator. So the host code under test
// is the one that is shipped.
#include <cuda_runtime.h>

#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "cuda/kernels.h"

namespace {

using Callback = void (*)(const char* name, unsigned num_blocks, unsigned num_threads,
                          const void* argument);

struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  cudaStream_t stream;
};

Callback callback = nullptr;
Configuration configuration;
void* last_stream = nullptr;

std::map<const void*, std::string>& kernel_names() {
  static std::map<const void*, std::string> names;
  return names;
}

// Runs `body`; returns the length of the message of the error that it threw, which is put into
// `message`.
template <typename Body>
int guarded(char* message, int size, const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    return std::snprintf(message, static_cast<size_t>(size), "%s", error.what());
  }
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  kernel_names()[host] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                     cudaStream_t stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                       void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t stream) {
  last_stream = stream;
  callback(kernel_names().at(host).c_str(), grid.x, block.x, arguments[0]);
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream) {
  return cudaLaunchKernel(host, grid, block, arguments, shared_bytes, stream);
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "no error"; }

void sim_set_callback(Callback function) { callback = function; }
void* sim_last_stream() { return last_stream; }

int sim_convert(const fsdpx::cuda::Piece* pieces, int64_t count, int from, int to, double scale,
                int accumulate, void* stream, char* message, int size) {
  return guarded(message, size, [&] {
    fsdpx::cuda::convert({pieces, static_cast<size_t>(count)}, static_cast<fsdpx::DType>(from),
                         static_cast<fsdpx::DType>(to), scale, accumulate != 0, stream);
  });
}

int sim_gather(const fsdpx::cuda::GatherPiece* pieces, int64_t count, void* const* peers,
               int64_t num_peers, int from, int to, char* message, int size) {
  return guarded(message, size, [&] {
    fsdpx::cuda::gather({pieces, static_cast<size_t>(count)},
                        {peers, static_cast<size_t>(num_peers)}, static_cast<fsdpx::DType>(from),
                        static_cast<fsdpx::DType>(to), nullptr);
  });
}

int sim_reduce(const void* const* srcs, int64_t count, int from, void* dst, int to, int64_t numel,
               double scale, int accumulate, void* stream, char* message, int size) {
  return guarded(message, size, [&] {
    fsdpx::cuda::reduce({srcs, static_cast<size_t>(count)}, static_cast<fsdpx::DType>(from), dst,
                        static_cast<fsdpx::DType>(to), numel, scale, accumulate != 0, stream);
  });
}

}  // extern "C"
