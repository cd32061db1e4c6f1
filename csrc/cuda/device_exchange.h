// Collectives on a GPU over the two primitives that any process group has: our passes around them,
// sums in rank order, so the numbers are those of the other communicators.
#pragma once

#include "../exchange_communicator.h"
#include "device_communicator.h"

namespace fsdpx::cuda {

class DeviceExchangeCommunicator final : public DeviceCommunicator {
 public:
  // The calls get GPU addresses and must enqueue on the communication stream.
  DeviceExchangeCommunicator(std::string kind, Surroundings surroundings, ByteCollectives calls);

 protected:
  void gather(const GatherOp& op, const Region& region) override;
  void sum_into_shards(const ReduceOp& op, const SendLayout& layout, const Region& send) override;
  void sum_in_place(void* data, DType dtype, int64_t numel) override;

 private:
  // Used by this stream alone, so one is enough; waits for the stream when it grows.
  char* scratch(int64_t nbytes);
  // The sum over ranks of the D pieces at `send`, which other ranks have alike.
  void sum_pieces(const char* send, DType wire, int64_t numel, void* target, DType to, double scale,
                  bool accumulate);

  const ByteCollectives calls_;
  Region scratch_;
};

}  // namespace fsdpx::cuda
