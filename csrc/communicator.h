// What a communicator does for one group of ranks. Calls are tasks of a communication stream: on
// CPU they block its worker thread, on a GPU they enqueue and return. Every rank makes the same
// calls in the same order, and each call first checks that they do (see Tag).
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "dtype.h"
#include "kernels.h"
#include "stream.h"

namespace fsdpx {

// When in its program a rank issues a collective: for messages, ranks need not agree on it.
struct Moment {
  enum Phase : uint8_t { kNone = 0, kForward = 1, kBackward = 2, kBetween = 3 };
  uint32_t step = 0;     // from 1; a step ends with its backward
  uint16_t forward = 0;  // how many forwards of this step have begun
  Phase phase = kNone;
};

// What all ranks must agree on before data moves. A difference raises DesyncError on every rank,
// naming both sides.
struct Tag {
  std::string unit;  // name of the unit, for messages too
  Moment moment = {};
};

// Memory that peers may write (all-gather destinations): `offset` bytes into region `region`, alike
// on all ranks.
struct Place {
  int64_t region = 0;
  int64_t offset = 0;
};

// One dtype segment of a unit: `numel` elements at `shard` are this rank's share; rank r's share
// becomes elements [r * numel, (r + 1) * numel) of the gathered segment, which starts `dst_offset`
// bytes into the place and has `dst_dtype`.
struct GatherSegment {
  const void* shard;
  DType shard_dtype;
  int64_t numel;
  int64_t dst_offset;
  DType dst_dtype;
};

struct GatherOp {
  Tag tag;
  Place place;
  std::vector<GatherSegment> segments;
  uint64_t contents = 0;  // a hash of what lies in the segments, alike on all ranks
};

// One dtype segment of a unit's gradients: `grads` lie in a flat segment of size() * numel
// elements; rank r receives the sum of elements [r * numel, (r + 1) * numel) over all ranks, in
// rank order, scaled, in (or added to) `shard`.
struct ReduceSegment {
  std::vector<ConstSpan> grads;
  DType grad_dtype;
  DType wire_dtype;
  int64_t numel;
  void* shard;
  DType shard_dtype;
  double scale = 1.0;
  bool accumulate = false;
};

// Flags that are known later than the collective that they travel with has been issued.
struct LateFlags {
  std::vector<uint8_t> flags;  // once `known` has ended
  std::shared_ptr<Event> known;
};

struct ReduceOp {
  Tag tag;
  std::vector<ReduceSegment> segments;
  // In: 1 where this rank has a gradient for parameter i; out: where any rank has. On a GPU these
  // come as `used_late`.
  std::vector<uint8_t> used;
  std::shared_ptr<const LateFlags> used_late;
};

struct Announcement;

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual const char* kind() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Collective: `nbytes` of zeroed memory that peers may write, page aligned, the same size on all
  // ranks. Returns the region's number. Called on the thread that issues collectives, never while
  // one runs. `region_data` is this rank's own copy; `release` unmaps it.
  virtual int64_t allocate(int64_t nbytes) = 0;
  virtual void* region_data(int64_t region) = 0;
  virtual void release(int64_t region) = 0;
  // Every rank's part of a region, by rank, mapped for as long as it is used; empty where ranks do
  // not map each other's memory.
  virtual std::vector<std::shared_ptr<void>> parts(int64_t /*region*/) { return {}; }

  // Bytes that this rank sent to others, counted as in (D - 1) / D * total; for the trace.
  virtual void all_gather(const GatherOp& op) = 0;
  // `prepare` comes right before: what is done on the caller's stream. On CPU that is nothing.
  virtual void prepare(const ReduceOp& /*op*/) {}
  virtual void reduce_scatter(ReduceOp& op) = 0;
  // Sum over ranks in rank order, in place, scaled; used for the replicate dimension of HSDP.
  virtual void all_reduce(const Tag& tag, void* data, DType dtype, int64_t numel, double scale) = 0;
  virtual void barrier(const Tag& tag) = 0;

  // Compares what the ranks are about to do elsewhere and sets the flags that any rank has set.
  // Only where the ranks' CPUs can talk: see cuda/device_communicator.h.
  virtual void agree(const Announcement& announcement, std::vector<uint8_t>& flags) = 0;

  // Memory for what reductions of up to `wire_bytes` send, on this rank.
  virtual int64_t send_buffer_bytes(int64_t wire_bytes) const { return 2 * wire_bytes; }

  // kernels.h's pack where the ranks' tensors live: on a GPU on the caller's stream.
  virtual void pack_gradients(std::span<const ConstSpan> srcs, DType from, void* flat, DType to,
                              int64_t flat_numel, bool accumulate) {
    fsdpx::pack(srcs, from, flat, to, flat_numel, 1.0, accumulate);
  }
  // Fills memory with NaN, after what the caller has issued: to find reads of freed memory.
  virtual void poison(void* data, int64_t nbytes) { std::memset(data, 0xff, nbytes); }

  // Tells peers that this rank leaves (their waits fail at once and say so) and releases
  // everything. Does not wait for them; on a GPU a second at most for what it aborts there.
  virtual void close() = 0;

  // What the program does now; issued collectives carry it in their tags.
  Moment moment() const { return moment_.load(std::memory_order_relaxed); }
  void set_moment(Moment moment) { moment_.store(moment, std::memory_order_relaxed); }

  // Leaves word for peers that will wait for this rank: that it raised, say. It holds until the
  // next collective, and runs in the order of those.
  virtual void leave_word(const std::string& /*text*/) {}

  // The event of the latest collective issued on a stream, kept by comm_queue.h; null before the
  // first.
  std::shared_ptr<Event> last_issued() {
    std::lock_guard lock(issue_mutex_);
    return last_issued_;
  }
  virtual void note_issued(std::shared_ptr<Event> event) {
    std::lock_guard lock(issue_mutex_);
    last_issued_ = std::move(event);
  }

 private:
  std::atomic<Moment> moment_ = Moment{};
  std::mutex issue_mutex_;
  std::shared_ptr<Event> last_issued_;
};

}  // namespace fsdpx
