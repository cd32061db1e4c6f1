// Memory of NCCL's that ranks map through its windows.
#pragma once

#include <memory>

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

}  // namespace fsdpx::cuda
