// CUDA streams as torch knows them: the pool that communication streams come from, and the stream
// on which the caller computes.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "stream.h"

namespace fsdpx {

// A high-priority stream of torch's pool for `device`. Throws std::runtime_error in a build without
// CUDA.
std::shared_ptr<Stream> make_device_stream(c10::Device device);

}  // namespace fsdpx
