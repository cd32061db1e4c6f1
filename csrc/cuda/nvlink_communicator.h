// Collectives by our own kernels, for ranks that can map each other's GPU memory (NVLink or PCIe,
// one host). An all-gather casts the shard once and stores it into every rank's slot; a reduction
// reads all ranks' send buffers and adds in rank order, in fp32, scaled into the shard: one pass
// each, and the bits are those of the CPU's communicators.
//
// Around each pass the ranks meet on their streams (barrier.h): before, because a slot must be
// free, or a send buffer full, on every rank; after, because all shards must have arrived, or all
// ranks have read.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "barrier.h"
#include "device_communicator.h"

namespace fsdpx::cuda {

class NvlinkCommunicator final : public DeviceCommunicator {
 public:
  // Collective; `memory` is of a source whose memory peers map. Throws on every rank when some rank
  // cannot map another's memory. With `copies`, all-gathers cast into the own slot and leave the
  // rest to the copy engines: no SM is busy with it.
  NvlinkCommunicator(Surroundings surroundings, std::shared_ptr<DeviceMemory> memory, bool copies);

 protected:
  void gather(const GatherOp& op, const Region& region) override;
  void sum_into_shards(const ReduceOp& op, const SendLayout& layout, const Region& send) override;
  void all_reduce_in_place(void* data, DType dtype, int64_t numel) override;
  void abort() override;
  std::string problem() override;
  void destroy() override;

 private:
  // Words that the GPU and the host share.
  struct Words {
    BarrierError error;
    uint64_t abort;
  };

  void meet();  // enqueues: all ranks have come here on their streams
  void store_to_all(const GatherOp& op, const Region& region);
  void copy_to_all(const GatherOp& op, const Region& region);

  const bool copies_;
  const int max_blocks_;
  std::shared_ptr<Words> words_;
  Region flags_;    // and what small all-reduces send
  Region scratch_;  // of large ones, made for the first
  Barrier barrier_{};
  uint64_t epoch_ = 0;
};

}  // namespace fsdpx::cuda
