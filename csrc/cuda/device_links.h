// How GPUs of one host are joined.
#pragma once

#include <string>

namespace fsdpx::cuda {

// What names a GPU of this host in every process, whatever it calls its devices.
std::string bus_id(int device);

// False where peer access between `device` and the GPU of this name goes over PCIe: then it has no
// native atomics. True over NVLink, for the same GPU, and where this process does not see the other
// one and so cannot tell.
bool may_have_nvlink(int device, const std::string& other);

}  // namespace fsdpx::cuda
