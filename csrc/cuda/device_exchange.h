// Collectives on a GPU by any process group that has them: its calls between our passes.
#pragma once

#include <functional>

#include "device_communicator.h"

namespace fsdpx::cuda {

// As DeviceCommunicator's primitives of these names: each enqueues on the communication stream.
struct DeviceCollectives {
  std::function<void(void* data, int64_t nbytes)> all_gather;
  std::function<void(void* data, DType dtype, int64_t numel)> reduce_scatter;
  std::function<void(void* data, DType dtype, int64_t numel)> all_reduce;
};

class DeviceExchange final : public DeviceCommunicator {
 public:
  DeviceExchange(std::string kind, Surroundings surroundings, DeviceCollectives calls)
      : DeviceCommunicator(std::move(kind), surroundings,
                           std::make_shared<PlainMemory>(surroundings.device())),
        calls_(std::move(calls)) {}

 protected:
  void all_gather_in_place(void* data, int64_t nbytes) override { calls_.all_gather(data, nbytes); }
  void reduce_scatter_in_place(void* data, DType dtype, int64_t numel) override {
    calls_.reduce_scatter(data, dtype, numel);
  }
  void all_reduce_in_place(void* data, DType dtype, int64_t numel) override {
    calls_.all_reduce(data, dtype, numel);
  }

 private:
  const DeviceCollectives calls_;
};

}  // namespace fsdpx::cuda
