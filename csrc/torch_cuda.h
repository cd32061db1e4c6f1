// CUDA streams as torch knows them: which one the caller computes on.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "stream.h"

namespace fsdpx {

// The communication stream over `stream`, a cudaStream_t of `device` that outlives it. Throws
// std::runtime_error in a build without CUDA.
std::shared_ptr<Stream> make_device_stream(c10::Device device, uintptr_t stream);

}  // namespace fsdpx
