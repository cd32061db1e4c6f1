// libcudart: devices and errors.
#include <cstdio>

#include "sim.h"

using namespace sim;

namespace {
constexpr int kMultiprocessors = 132;
}

API cudaError_t cudaGetDeviceCount(int* n) {
  Lock lock;
  *n = int(settings.devices);
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* d) {
  *d = device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int d) {
  Lock lock;
  if (d < 0 || d >= settings.devices) return result(cudaErrorInvalidDevice);
  device = d;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  Lock lock;
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "simulated device %d (host memory)", d);
  p->major = int(settings.arch) / 10;
  p->minor = int(settings.arch) % 10;
  p->multiProcessorCount = kMultiprocessors;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->totalGlobalMem = size_t(settings.memory_mb) << 20;
  p->l2CacheSize = 50 << 20;
  p->unifiedAddressing = 1;
  p->pciBusID = d + 1;
  for (int i = 0; i < 3; ++i) {
    p->maxThreadsDim[i] = i == 2 ? 64 : 1024;
    p->maxGridSize[i] = i ? 65535 : 2147483647;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  Lock lock;
  const std::map<int, int> known = {{cudaDevAttrMultiProcessorCount, kMultiprocessors},
                                    {cudaDevAttrComputeCapabilityMajor, int(settings.arch) / 10},
                                    {cudaDevAttrComputeCapabilityMinor, int(settings.arch) % 10},
                                    {cudaDevAttrMaxThreadsPerBlock, 1024},
                                    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
                                    {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
                                    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10},
                                    {cudaDevAttrUnifiedAddressing, 1},
                                    {cudaDevAttrWarpSize, 32}};
  const auto found = known.find(int(a));
  *v = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) {
  snprintf(s, static_cast<size_t>(n), "0000:%02x:00.0", d + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetByPCIBusId(int* d, const char* s) {
  Lock lock;
  unsigned bus = 0;
  const bool found = sscanf(s, "0000:%2x:00.0", &bus) == 1 && bus >= 1 && bus <= settings.devices;
  *d = int(bus) - 1;
  return found ? cudaSuccess : result(cudaErrorInvalidDevice);
}
API cudaError_t cudaDeviceGetP2PAttribute(int* v, cudaDeviceP2PAttr a, int from, int to) {
  Lock lock;
  if (from == to) return result(cudaErrorInvalidDevice);
  *v = a == cudaDevP2PAttrNativeAtomicSupported ? settings.nvlink != 0 : 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) {
  *low = 0;
  *high = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* v, int, int) {
  *v = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  Lock lock;
  sync_all();
  return result();
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** f, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* found) {
  *f = nullptr;
  if (found) *found = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- Errors

API cudaError_t cudaGetLastError() {
  Lock lock;
  const cudaError_t e = fault.code ? fault.code : last_error;
  last_error = cudaSuccess;
  return e;
}
API cudaError_t cudaPeekAtLastError() {
  Lock lock;
  return fault.code ? fault.code : last_error;
}
API const char* cudaGetErrorName(cudaError_t e) {
  static thread_local char name[32];
  snprintf(name, sizeof name, "cudaError%d", int(e));
  return name;
}
API const char* cudaGetErrorString(cudaError_t e) {
  Lock lock;
  if (e == cudaSuccess) return "no error";
  if (e == fault.code) return fault.text.c_str();
  if (e == cudaErrorMemoryAllocation) return "out of memory (simulated)";
  if (e == cudaErrorNotSupported) return "not supported by the simulation";
  if (e == cudaErrorNoKernelImageForDevice) return "the simulation has no PTX for this kernel";
  return cudaGetErrorName(e);
}
