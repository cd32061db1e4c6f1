// Collectives of the ranks of one host through shared memory, fused with the passes over the data
// that must happen anyway.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "communicator.h"
#include "shm_board.h"
#include "shm_region.h"

namespace fsdpx {

struct ShmOptions {
  double timeout = 1800;        // seconds, of each wait for other ranks
  double connect_timeout = 60;  // the same while connecting
  // Of each of the two send buffers; larger reductions go in parts.
  int64_t max_send_bytes = int64_t{2} << 20;
};

// Made in two steps: each rank makes its own (which opens its door to peers), all tell each other
// their addresses, and all connect.
class ShmBootstrap {
 public:
  // "sockets", "names", or "private" for a group of one rank.
  explicit ShmBootstrap(const std::string& way);

  const std::string& address() const { return address_; }
  std::shared_ptr<Communicator> connect(int rank, const std::vector<std::string>& addresses,
                                        const ShmOptions& options);

 private:
  std::string address_;  // before what fills it
  std::shared_ptr<Exchange> exchange_;
  std::shared_ptr<Mapping> control_;
};

class ShmCommunicator final : public Communicator {
 public:
  // `exchange` is connected; `control` was the first thing that it made.
  ShmCommunicator(int rank, int size, std::shared_ptr<Exchange> exchange,
                  std::shared_ptr<Mapping> control, const ShmOptions& options);
  ~ShmCommunicator() override;

  const char* kind() const override { return "shm"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  int64_t allocate(int64_t nbytes) override;
  void* region_data(int64_t region) override;
  void release(int64_t region) override;
  std::vector<std::shared_ptr<void>> parts(int64_t region) override;

  void all_gather(const GatherOp& op) override;
  void reduce_scatter(ReduceOp& op) override;
  void all_reduce(const Tag& tag, void* data, DType dtype, int64_t numel, double scale) override;
  void barrier(const Tag& tag) override;
  void agree(const Announcement& announcement, std::vector<uint8_t>& flags) override;
  int64_t send_buffer_bytes(int64_t wire_bytes) const override {
    return 2 * std::min(wire_bytes, options_.max_send_bytes);
  }

  void leave_word(const std::string& text) override { board_->leave_note(text); }
  void close() override;

 private:
  using Region = std::vector<std::shared_ptr<Mapping>>;  // by rank

  // Runs one collective: with the lock, in the right process, and telling the others if it fails.
  template <typename Body>
  void collective(Body body);
  std::shared_ptr<const Region> make_region(const Announcement& announcement);
  std::shared_ptr<const Region> find_region(int64_t number);
  const Region& next_send_buffer(const Tag& tag, int64_t nbytes);
  void check_gather(const GatherOp& op, int64_t region_bytes) const;
  void scatter_shard(const GatherOp& op, const Region& region);
  void reduce_part(ReduceOp& op, const Announcement& announcement);
  void all_reduce_part(const Announcement& announcement, char* data, DType dtype, int64_t numel,
                       double scale);
  void merge_flags(const Region& buffer, int64_t offset, std::vector<uint8_t>& flags);
  void sum_pieces(ReduceOp& op, const Region& buffer);
  void pack_for_peers(const ReduceSegment& segment, char* flat);

  const int rank_;
  const int size_;
  const int pid_;
  const ShmOptions options_;
  std::shared_ptr<Exchange> exchange_;
  std::unique_ptr<Board> board_;
  std::mutex mutex_;  // one collective at a time

  std::mutex regions_mutex_;
  std::map<int64_t, std::shared_ptr<const Region>> regions_;
  int64_t num_regions_ = 0;

  std::shared_ptr<const Region> send_buffers_[2];
  uint64_t num_sends_ = 0;
};

}  // namespace fsdpx
