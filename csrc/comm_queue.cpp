#include "comm_queue.h"

#include <limits>
#include <utility>

namespace fsdpx {
namespace {

// Enqueues `prepare` and `call`, which is timed for the recorder. `owned` goes when the task has
// ended, before its event does.
template <typename Prepare, typename Call>
std::shared_ptr<Event> issue(Stream& stream, Communicator& comm, const Tag& tag,
                             const char* operation, int64_t bytes, Recorder* recorder,
                             std::shared_ptr<void> owned, Prepare prepare, Call call) {
  const bool record = recorder != nullptr && recorder->enabled();
  const int64_t issue_ns = record ? now_ns() : 0;
  std::string unit = record ? tag.unit : std::string();
  auto event =
      stream.enqueue([prepare = std::move(prepare), call = std::move(call), unit = std::move(unit),
                      owned = std::move(owned), clock = record ? stream.clock() : Clock(),
                      operation, bytes, recorder, issue_ns] {
        prepare();
        const Instant begin = clock ? clock() : Instant();
        call();
        if (clock) recorder->record({"comm", unit, operation, issue_ns, begin, clock(), bytes});
      });
  comm.note_issued(event);
  return event;
}

}  // namespace

int64_t wire_bytes(const GatherOp& op, int num_ranks) {
  int64_t bytes = 0;
  for (const GatherSegment& s : op.segments) bytes += s.numel * itemsize(s.dst_dtype);
  return bytes * (num_ranks - 1);
}

int64_t wire_bytes(const ReduceOp& op, int num_ranks) {
  int64_t bytes = 0;
  for (const ReduceSegment& s : op.segments) bytes += s.numel * itemsize(s.wire_dtype);
  return bytes * (num_ranks - 1);
}

std::shared_ptr<Event> issue_all_gather(Stream& stream, std::shared_ptr<Communicator> comm,
                                        std::shared_ptr<const GatherOp> op, Recorder* recorder,
                                        std::shared_ptr<void> keep_alive) {
  Communicator& target = *comm;  // before the closure takes the pointer
  const int64_t bytes = wire_bytes(*op, target.size());
  const Tag& tag = op->tag;
  return issue(
      stream, target, tag, "all_gather", bytes, recorder, std::move(keep_alive), [] {},
      [comm = std::move(comm), op = std::move(op)] { comm->all_gather(*op); });
}

std::shared_ptr<Event> issue_reduce_scatter(Stream& stream, std::shared_ptr<Communicator> comm,
                                            std::shared_ptr<ReduceOp> op,
                                            std::shared_ptr<void> keep_alive, Recorder* recorder) {
  Communicator& target = *comm;  // before the closure takes the pointer
  const int64_t bytes = wire_bytes(*op, target.size());
  const Tag& tag = op->tag;
  return issue(
      stream, target, tag, "reduce_scatter", bytes, recorder, std::move(keep_alive),
      [comm, op] { comm->prepare(*op); }, [comm, op] { comm->reduce_scatter(*op); });
}

std::shared_ptr<Event> issue_all_reduce(Stream& stream, std::shared_ptr<Communicator> comm,
                                        AllReduceOp op, std::shared_ptr<void> keep_alive,
                                        Recorder* recorder) {
  // Each rank sends all other pieces for the sum, then its own piece of the sum to everyone.
  Communicator& target = *comm;
  const int num_ranks = target.size();
  const int64_t bytes = 2 * (op.numel * itemsize(op.dtype)) * (num_ranks - 1) / num_ranks;
  const Tag tag = op.tag;
  return issue(
      stream, target, tag, "all_reduce", bytes, recorder, std::move(keep_alive), [] {},
      [comm = std::move(comm), op = std::move(op)] {
        comm->all_reduce(op.tag, op.data, op.dtype, op.numel, op.scale);
      });
}

int64_t allocate_in_order(Communicator& comm, int64_t nbytes) {
  if (const auto event = comm.last_issued())
    event->ended_within(std::numeric_limits<double>::infinity());
  return comm.allocate(nbytes);
}

}  // namespace fsdpx
