// Memory of NCCL's own: mapped by ranks through its windows, or registered with communicators.
#pragma once

#include <memory>
#include <vector>

#include "device_memory.h"
#include "nccl_connection.h"

namespace fsdpx::cuda {

class WindowMemory final : public MappedMemory {
 public:
  // Collective; throws on all ranks where NCCL is missing or too old on one, or cannot connect.
  explicit WindowMemory(const Surroundings& surroundings);
  Region make(int64_t nbytes) override;
  void close() noexcept override;

 protected:
  Mapped map(const Region& region) override;

 private:
  std::shared_ptr<nccl::Connection> connection_;
};

// Peers map nothing; NCCL's collectives need not copy what is registered.
class RegisteredMemory final : public DeviceMemory {
 public:
  RegisteredMemory(int device, std::shared_ptr<nccl::Connection> connection,
                   std::vector<nccl::Comm> comms);
  Region make(int64_t nbytes) override;
  bool maps_peers() const override { return false; }

 private:
  const int device_;
  const std::shared_ptr<nccl::Connection> connection_;
  const std::vector<nccl::Comm> comms_;
};

}  // namespace fsdpx::cuda
