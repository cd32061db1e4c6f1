#include "torch_cuda.h"

#include "check.h"

#ifdef FSDPX_CUDA
#include <c10/cuda/CUDAStream.h>

#include "cuda/device_stream.h"
#endif

namespace fsdpx {

#ifdef FSDPX_CUDA
std::shared_ptr<Stream> make_device_stream(c10::Device device, uintptr_t stream) {
  check(device.is_cuda() && device.has_index(), "a CUDA stream needs a CUDA device with an index");
  const auto current = [](int index) {
    return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(index)).stream();
  };
  return std::make_shared<cuda::DeviceStream>(device.index(),
                                              reinterpret_cast<cudaStream_t>(stream), current);
}
#else
std::shared_ptr<Stream> make_device_stream(c10::Device, uintptr_t) {
  check<std::runtime_error>(false,
                            "this build of fsdpx has no CUDA: build it where nvcc is found and "
                            "torch has CUDA");
  return nullptr;
}
#endif

}  // namespace fsdpx
