// Collectives issued on a communication stream: each call returns at once with the event of its
// end. The recorder, where given, gets one entry per collective and must outlive the stream's
// tasks.
#pragma once

#include <memory>

#include "communicator.h"
#include "stream.h"
#include "trace.h"

namespace fsdpx {

// Bytes that a rank sends in an all-gather or all-reduce, or receives in a reduce-scatter: (D - 1)
// / D of the unit.
int64_t wire_bytes(const GatherOp& op, int num_ranks);
int64_t wire_bytes(const ReduceOp& op, int num_ranks);

// The memory that the operation names stays valid until the event ends; `keep_alive` is released
// just before.
std::shared_ptr<Event> issue_all_gather(Stream& stream, std::shared_ptr<Communicator> comm,
                                        std::shared_ptr<const GatherOp> op, Recorder* recorder,
                                        std::shared_ptr<void> keep_alive = nullptr);

// `op->used` holds the result once the event has ended.
std::shared_ptr<Event> issue_reduce_scatter(Stream& stream, std::shared_ptr<Communicator> comm,
                                            std::shared_ptr<ReduceOp> op,
                                            std::shared_ptr<void> keep_alive, Recorder* recorder);

// A sum over ranks in place; see Communicator::all_reduce.
struct AllReduceOp {
  Tag tag;
  void* data;
  DType dtype;
  int64_t numel;
  double scale = 1.0;
};

std::shared_ptr<Event> issue_all_reduce(Stream& stream, std::shared_ptr<Communicator> comm,
                                        AllReduceOp op, std::shared_ptr<void> keep_alive,
                                        Recorder* recorder);

// Allocates once all collectives issued so far have ended: allocating is a collective too, and must
// have its place in the order.
int64_t allocate_in_order(Communicator& comm, int64_t nbytes);

}  // namespace fsdpx
