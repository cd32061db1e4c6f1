// libcudart: memory, copies, and handles of memory for other processes.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "ipc.h"
#include "sim.h"

using namespace sim;

namespace {

std::map<char*, size_t>& pinned = *new std::map<char*, size_t>;
auto& opened_handles = *new std::multimap<void*, std::atomic<int>*>;

bool is_pageable(const void* p) { return !on_device(p) && !is_pinned(p); }

// Copies are charged by what they cross: device memory, or the link to the host.
double copy_rate(const void* dst, const void* src) {
  return rate(on_device(dst) && on_device(src) ? settings.mem_gbps : settings.host_gbps);
}

void push_memory_op(cudaStream_t s, const char* name, double bytes, double bytes_per_us,
                    std::function<void()> f) {
  count(kCopies);
  Op op;
  op.name = name;
  op.rate = bytes_per_us;
  op.fixed_us = settings.launch_us;
  op.run = [bytes, f = std::move(f)] {
    f();
    return bytes;
  };
  push(stream_of(s), std::move(op));
}

}  // namespace

bool sim::is_pinned(const void* p, size_t size) {
  const char* const c = static_cast<const char*>(p);
  auto found = pinned.upper_bound(const_cast<char*>(c));
  if (found == pinned.begin()) return false;
  --found;
  return c + size <= found->first + found->second;
}

API cudaError_t cudaMalloc(void** p, size_t size) {
  Lock lock;
  enter_context();
  *p = allocate(size, 512);
  return *p ? result() : result(cudaErrorMemoryAllocation);
}
API cudaError_t cudaFree(void* p) {
  Lock lock;
  if (!p) return cudaSuccess;
  enter_context();
  sync_all();
  count(kFrees);
  const auto region = device_heap.regions.find(static_cast<char*>(p));
  if (region != device_heap.regions.end() && mappings_of(region->first, region->second) != 0) {
    raise(cudaErrorIllegalAddress, "memory is freed that is still mapped");
  }
  // No fault: destructors call this.
  return device_heap.give(static_cast<char*>(p)) ? cudaSuccess : result(cudaErrorInvalidValue);
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock;
  *total = size_t(settings.memory_mb) << 20;
  *free = *total - std::min(*total, device_heap.used);
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** p, size_t size, unsigned) {
  Lock lock;
  *p = aligned_alloc(4096, (size + 4095) & ~size_t(4095));
  pinned[static_cast<char*>(*p)] = size;
  count(kAllocations);
  return cudaSuccess;
}
API cudaError_t cudaMallocHost(void** p, size_t size) { return cudaHostAlloc(p, size, 0); }
API cudaError_t cudaFreeHost(void* p) {
  Lock lock;
  sync_all();
  count(kFrees);
  pinned.erase(static_cast<char*>(p));
  free(p);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* p, size_t size, unsigned) {
  Lock lock;
  pinned[static_cast<char*>(p)] = size;
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  Lock lock;
  pinned.erase(static_cast<char*>(p));
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void** p, void* host, unsigned) {
  Lock lock;
  if (!is_pinned(host)) return result(cudaErrorInvalidValue);
  *p = host;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Lock lock;
  memset(a, 0, sizeof *a);
  void* const q = const_cast<void*>(p);
  a->device = -2;
  if (on_device(p)) {
    const auto* region = device_heap.find(p);
    a->type = cudaMemoryTypeDevice;
    a->devicePointer = q;
    a->device = region ? region->second.device : slot_of(p);
  } else if (is_pinned(p)) {
    a->type = cudaMemoryTypeHost;
    a->hostPointer = a->devicePointer = q;
    a->device = 0;
  }
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  Lock lock;
  if (!n) return result();
  std::string staged;  // a pageable source is read before the call returns
  if (is_pageable(s)) staged.assign(static_cast<const char*>(s), n);
  push_memory_op(st, "memcpy", double(n), copy_rate(d, s),
                 [=] { copy(d, staged.empty() ? s : staged.data(), n); });
  if (is_pageable(d)) sync(stream_of(st));  // and for a pageable destination the call waits
  return result();
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind k) {
  Lock lock;
  cudaMemcpyAsync(d, s, n, k, nullptr);
  sync(stream_of(nullptr));
  return result();
}
API cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  return cudaMemcpyAsync(d, s, n, cudaMemcpyDefault, st);
}
API cudaError_t cudaMemcpy2DAsync(void* d, size_t d_pitch, const void* s, size_t s_pitch,
                                  size_t width, size_t height, cudaMemcpyKind, cudaStream_t st) {
  Lock lock;
  push_memory_op(st, "memcpy2d", double(width * height), copy_rate(d, s), [=] {
    for (size_t i = 0; i < height; ++i) {
      copy(static_cast<char*>(d) + i * d_pitch, static_cast<const char*>(s) + i * s_pitch, width);
    }
  });
  if (is_pageable(d) || is_pageable(s)) sync(stream_of(st));
  return result();
}
API cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t st) {
  Lock lock;
  push_memory_op(st, "memset", double(n), rate(settings.mem_gbps), [=] {
    memset(d, v, n);
    mark_written(d, n);
  });
  return result();
}
API cudaError_t cudaMemset(void* d, int v, size_t n) { return cudaMemsetAsync(d, v, n, nullptr); }

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* h, void* p) {
  Lock lock;
  const auto* region = device_heap.find(p);
  if (!region) return result(cudaErrorInvalidValue);
  // CUDA's handles stand for whole allocations too.
  ipc::fill(h, ipc::kMemory, region->first, &mappings_of(region->first, region->second));
  return result();
}
API cudaError_t cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t h, unsigned) {
  Lock lock;
  ipc::Content opened;
  const cudaError_t error = ipc::open(h, ipc::kMemory, p, &opened);
  if (error != cudaSuccess) return result(error);
  ++*opened.mappings;
  opened_handles.emplace(*p, opened.mappings);
  return result();
}
API cudaError_t cudaIpcCloseMemHandle(void* p) {
  Lock lock;
  const auto opened = opened_handles.find(p);
  if (opened == opened_handles.end()) return result(cudaErrorInvalidValue);
  sync_all();  // as CUDA does: what runs may use it
  --*opened->second;
  opened_handles.erase(opened);
  return result();
}
