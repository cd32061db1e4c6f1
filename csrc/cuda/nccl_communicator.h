// Collectives by NCCL: gathers in place in the slot, reductions as plain sums, scaled and added up
// by our own pass.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "device_communicator.h"
#include "nccl_connection.h"
#include "nccl_library.h"

namespace fsdpx::cuda {

class NcclCommunicator final : public DeviceCommunicator {
 public:
  // Two communicators, one for each direction, so that neither's settings nor buffers are the
  // other's.
  struct Comms {
    std::shared_ptr<nccl::Connection> connection;
    nccl::Comm gathers, sums;
  };

  // Collective. `source` is "plain", or "window" for memory of NCCL's own, registered with it.
  // Throws on every rank when some rank has no such memory, or could not connect in time.
  static std::shared_ptr<NcclCommunicator> connect(const Surroundings& surroundings,
                                                   const std::string& source);
  NcclCommunicator(Surroundings surroundings, std::shared_ptr<DeviceMemory> memory, Comms comms);

 protected:
  void all_gather_in_place(void* data, int64_t nbytes) override;
  void reduce_scatter_in_place(void* data, DType dtype, int64_t numel) override;
  void all_reduce_in_place(void* data, DType dtype, int64_t numel) override;
  void begin_group() override;
  void end_group() override;
  void abort() override { comms_.connection->abort(); }
  std::string problem() override { return comms_.connection->problem(); }
  void destroy() override { comms_.connection->abort(); }

 private:
  const nccl::Library& nccl_ = nccl::library();
  const Comms comms_;
  std::optional<nccl::Connection::Calls> group_;  // while it is open
};

}  // namespace fsdpx::cuda
