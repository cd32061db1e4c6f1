#include "device_links.h"

#include <cuda_runtime_api.h>

#include "device_stream.h"

namespace fsdpx::cuda {

std::string bus_id(int device) {
  char name[32] = {};
  check_cuda(cudaDeviceGetPCIBusId(name, sizeof(name), device), "cudaDeviceGetPCIBusId");
  return name;
}

bool may_have_nvlink(int device, const std::string& other) {
  int peer = -1;
  if (cudaDeviceGetByPCIBusId(&peer, other.c_str()) != cudaSuccess) {
    cudaGetLastError();  // CUDA_VISIBLE_DEVICES hides it
    return true;
  }
  if (peer == device) return true;
  int atomics = 0;
  check_cuda(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, peer),
             "cudaDeviceGetP2PAttribute");
  return atomics != 0;
}

}  // namespace fsdpx::cuda
