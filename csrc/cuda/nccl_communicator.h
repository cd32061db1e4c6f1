// Collectives by NCCL: gathers in place in the slot, reductions as plain sums, scaled and added up
// by our own pass.
#pragma once

#include <optional>
#include <string>

#include "device_communicator.h"
#include "nccl_connection.h"
#include "nccl_library.h"

namespace fsdpx::cuda {

class NcclCommunicator final : public DeviceCommunicator {
 public:
  // Collective. Throws on every rank when some rank could not connect in time.
  explicit NcclCommunicator(Surroundings surroundings);

 protected:
  void all_gather_in_place(void* data, int64_t nbytes) override;
  void reduce_scatter_in_place(void* data, DType dtype, int64_t numel) override;
  void all_reduce_in_place(void* data, DType dtype, int64_t numel) override;
  void begin_group() override;
  void end_group() override;
  void abort() override { connection_.abort(); }
  std::string problem() override { return connection_.problem(); }
  void destroy() override { connection_.abort(); }

 private:
  const nccl::Library& nccl_ = nccl::library();
  nccl::Connection connection_;
  // One for each direction, so that neither's settings nor buffers are the other's.
  const nccl::Comm gathers_, sums_;
  std::optional<nccl::Connection::Calls> group_;  // while it is open
};

}  // namespace fsdpx::cuda
