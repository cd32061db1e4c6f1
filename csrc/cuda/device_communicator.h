// What communicators on GPUs share: regions, send buffers, the passes around the exchange, the
// agreement of the ranks, and what happens when something goes wrong. It is complete for one rank;
// kinds for more ranks override what is virtual below.
//
// [Note: Control plane] Kernels are enqueued long before they run, so ranks that do different
// things would find out from a hang. Each collective is therefore announced on CPU too: the worker
// of `control`, a communicator of the same ranks, compares the announcements while the GPU goes on,
// and brings back the flags of a reduction. When ranks differ, or a collective does not end in
// time, the communicator is broken: abort() ends what runs, and every later call throws the reason.
//
// [Note: Order on the GPU] Packing runs on the caller's stream, so gradients may go as soon as
// reduce_scatter() returns. The communication stream follows it; the next pack into the same of the
// two send buffers follows the reduction that reads it.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../comm_announcement.h"
#include "../comm_layout.h"
#include "../communicator.h"
#include "device_memory.h"
#include "device_stream.h"
#include "device_surroundings.h"
#include "watchdog.h"

namespace fsdpx::cuda {

class DeviceCommunicator : public Communicator,
                           public std::enable_shared_from_this<DeviceCommunicator> {
 public:
  DeviceCommunicator(std::string kind, Surroundings surroundings,
                     std::shared_ptr<DeviceMemory> memory);
  ~DeviceCommunicator() override;

  const char* kind() const override { return kind_.c_str(); }
  int rank() const override { return surroundings_.rank(); }
  int size() const override { return surroundings_.size(); }

  int64_t allocate(int64_t nbytes) override;
  void* region_data(int64_t region) override;
  void release(int64_t region) override;

  void all_gather(const GatherOp& op) override;
  void prepare(const ReduceOp& op) override;  // packs
  void reduce_scatter(ReduceOp& op) override;
  void all_reduce(const Tag& tag, void* data, DType dtype, int64_t numel, double scale) override;
  void barrier(const Tag& tag) override;
  void agree(const Announcement& announcement, std::vector<uint8_t>& flags) override;
  void pack_gradients(std::span<const ConstSpan> srcs, DType from, void* flat, DType to,
                      int64_t flat_numel, bool accumulate) override;
  void poison(void* data, int64_t nbytes) override;

  void note_issued(std::shared_ptr<Event> event) override;  // and watches it
  void close() override;

  void check_usable() const;  // throws what broke the communicator, if anything did
  // After close(): until all ranks have unmapped what they mapped, for at most `seconds`.
  bool wait_for_peers(double seconds) noexcept { return memory_->wait_for_peers(seconds); }

 protected:
  // ---- What kinds differ in. All but the last two run on the thread that issues collectives and
  // enqueue on stream(); offsets and sizes have been checked and the ranks' agreement is under way.

  // Every rank's shards into the place of every rank's region; by default our cast into the own
  // part and then all_gather_in_place.
  virtual void gather(const GatherOp& op, const Region& region);
  // The sum over ranks of what lies in the send buffers, into the shards; by default
  // reduce_scatter_in_place and then our pass from the own part.
  virtual void sum_into_shards(const ReduceOp& op, const SendLayout& layout, const Region& send);
  // On flat memory, in which rank r's part is the rth; the parts are of `nbytes` and `numel`. Sums
  // are not scaled. With one rank there is nothing to do. Several calls come in one group.
  virtual void all_gather_in_place(void* data, int64_t nbytes);
  virtual void reduce_scatter_in_place(void* data, DType dtype, int64_t numel);
  virtual void all_reduce_in_place(void* data, DType dtype, int64_t numel);
  virtual void begin_group() {}
  virtual void end_group() {}
  // Ends what runs on the GPU, from any thread; at most once.
  virtual void abort() {}
  // An error that came up beside the stream, or nothing; called now and then by the watchdog.
  virtual std::string problem() { return {}; }
  // Gives back what is not in regions and send buffers. Nothing runs any more.
  virtual void destroy() {}

  // ---- For them
  cudaStream_t stream() const { return surroundings_.stream->get(); }
  int device() const { return surroundings_.device(); }
  // A region on every rank or an error on every rank. Waits on the host.
  Region make_alike(const Announcement& announcement);
  // Casts this rank's shards to where they belong in its own part of the place.
  void cast_own(const GatherOp& op, const Region& region);
  void fail(std::exception_ptr error) noexcept;  // from any thread; the first one counts
  bool is_broken() const;

 private:
  struct SendBuffer {
    Region region;
    std::shared_ptr<DeviceEvent> read;  // the reduction that reads it
  };

  // Calls `passes`. What they say of a communicator that fails meanwhile is not the reason.
  void run(const std::function<void()>& passes);
  // Calls `calls` in a group, which ends whatever happens: groups belong to threads, not to us.
  void in_group(const std::function<void()>& calls);
  std::shared_ptr<const LateFlags> announce(const Announcement& announcement,
                                            std::vector<uint8_t> flags);
  Watchdog& watchdog();
  std::vector<uint8_t> agree_now(const Announcement& announcement, std::vector<uint8_t> flags);
  Region find_region(int64_t number) const;
  void check_gather(const GatherOp& op, const Region& region) const;
  SendBuffer& next_send_buffer(const Tag& tag, int64_t nbytes);
  void unmap_peers();

  const std::string kind_;
  const Surroundings surroundings_;
  const std::shared_ptr<DeviceMemory> memory_;
  const int pid_;
  std::string announced_;  // the last one, with its rank and number, in words
  uint64_t sequence_ = 0;

  mutable std::mutex regions_mutex_;
  std::map<int64_t, Region> regions_;
  int64_t num_regions_ = 0;

  std::shared_ptr<Event> last_;  // collective
  SendBuffer send_buffers_[2];
  uint64_t num_sends_ = 0;
  SendBuffer* packed_ = nullptr;  // from prepare to reduce_scatter

  mutable std::mutex failure_mutex_;
  std::exception_ptr failure_;
  std::atomic<bool> closed_{false};
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace fsdpx::cuda
