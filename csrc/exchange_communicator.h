// Collectives over two primitives that any process group has, for ranks that share no memory. The
// data is packed and cast here before it travels and summed here, in rank order, after; so the
// numbers are those of the other communicators.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm_announcement.h"
#include "communicator.h"

namespace fsdpx {

// A collective of the process group failed: some rank may have left.
struct PeerFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The collectives take `nbytes` per rank. `send` may lie within `recv`, at this rank's place, in
// all_gather. They block, and throw PeerFailure or CommTimeout. The others use a channel beside the
// collectives that works when those have failed.
struct ByteCollectives {
  using Call = std::function<void(const void* send, void* recv, int64_t nbytes)>;
  Call all_gather;  // recv: every rank's nbytes, in rank order
  Call all_to_all;  // send: nbytes for every rank; recv: nbytes from every rank
  std::function<void(uint64_t sequence, const std::string& text)> tell;  // where this rank is
  std::function<std::string(uint64_t sequence)> ask;  // where the others are; waits a little
};

class ExchangeCommunicator final : public Communicator {
 public:
  ExchangeCommunicator(std::string kind, int rank, int size, ByteCollectives calls);

  const char* kind() const override { return kind_.c_str(); }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  int64_t allocate(int64_t nbytes) override;
  void* region_data(int64_t region) override;
  void release(int64_t region) override;

  void all_gather(const GatherOp& op) override;
  void reduce_scatter(ReduceOp& op) override;
  void all_reduce(const Tag& tag, void* data, DType dtype, int64_t numel, double scale) override;
  void barrier(const Tag& tag) override;
  void agree(const Announcement& announcement, std::vector<uint8_t>& flags) override;

  void leave_word(const std::string& text) override;
  void close() override;

 private:
  // Bytes that are not zeroed when they grow.
  class Buffer {
   public:
    char* resize(int64_t nbytes);

   private:
    std::unique_ptr<char[]> data_;
    int64_t capacity_ = 0;
  };
  struct Region {
    std::shared_ptr<char[]> memory;
    char* data;  // aligned to a page
    int64_t nbytes;
  };

  // Compares what the ranks are about to do, then does it. A failure is remembered and raised by
  // every later call.
  template <typename Body>
  void collective(const Announcement& announcement, Body body);
  void compare(const Announcement& announcement);
  std::string explain(const Announcement& announcement, const std::exception& error);
  Region find_region(int64_t number);
  void gather_segment(const GatherSegment& segment, char* place);
  void merge_flags(std::vector<uint8_t>& flags);
  void all_to_all_sum(const ReduceSegment& segment);

  const std::string kind_;
  const int rank_;
  const int size_;
  const int pid_;
  const ByteCollectives calls_;
  std::mutex mutex_;  // one collective at a time
  uint64_t sequence_ = 0;
  Announcement previous_;
  std::exception_ptr broken_;
  std::atomic<bool> closed_{false};
  Buffer send_, receive_;

  std::mutex regions_mutex_;
  std::map<int64_t, Region> regions_;
  int64_t num_regions_ = 0;
};

}  // namespace fsdpx
