// Collectives by NCCL: gathers in place in the slot, reductions as plain sums, scaled and added up
// by our own pass.
#pragma once

#include <memory>
#include <mutex>

#include "device_communicator.h"
#include "nccl_library.h"

namespace fsdpx::cuda {

class NcclCommunicator final : public DeviceCommunicator {
 public:
  // Collective; `id` is alike on all ranks.
  NcclCommunicator(Surroundings surroundings, const nccl::UniqueId& id);
  ~NcclCommunicator() override;

 protected:
  void all_gather_in_place(void* data, int64_t nbytes) override;
  void reduce_scatter_in_place(void* data, DType dtype, int64_t numel) override;
  void all_reduce_in_place(void* data, DType dtype, int64_t numel) override;
  void begin_group() override;
  void end_group() override;
  void abort() override;
  std::string problem() override;
  void destroy() override;

 private:
  const nccl::Library& nccl_ = nccl::library();
  std::mutex mutex_;  // of the pointers: they go when another thread aborts
  // One for each direction, so that neither's settings nor buffers are the other's.
  nccl::Comm gathers_ = nullptr, sums_ = nullptr;
};

}  // namespace fsdpx::cuda
