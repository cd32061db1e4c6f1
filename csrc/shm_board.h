// Where the ranks of one host tell each other what they do: one control block per rank in shared
// memory, written by its rank alone.
//
// [Note: Memory orders] A rank writes its data and its announcement with ordinary (announcements:
// relaxed atomic) stores and then raises an epoch with a release store. A peer that reads the epoch
// with an acquire load and finds it high enough sees all of that. Epochs only grow, and are
// compared by difference, so that 2^32 collectives are not the end. The state of a block works
// alike: its message is written before. Sleeping is on the epoch's word itself: the futex call
// compares the word again, so no wake-up is lost; a change of another block's state wakes all
// words, and the one wake-up that can slip in between test and sleep costs one kSlice.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm_announcement.h"
#include "shm_region.h"

namespace fsdpx {

using Epoch = std::atomic<uint32_t>;

enum class BoardState : uint32_t { kRunning = 0, kLeft, kDesync, kTimeout, kFailed };

constexpr int kMessageChars = 3072;
constexpr int kNoteWords = 32;

struct ControlBlock {
  alignas(64) Epoch
      ready;  // my announcement of this collective stands, my place is free, my data is packed
  alignas(64) Epoch arrived;  // what I write into other ranks' memory is there
  alignas(64) Epoch done;     // I have finished
  alignas(64) std::atomic<uint32_t> state;
  char message[kMessageChars];
  std::atomic<uint64_t> slots[2][kAnnouncementWords];  // by the parity of the sequence number:
                                                       // nobody is two collectives ahead
  std::atomic<uint64_t> note[kNoteWords];              // text; only of this collective:
  std::atomic<uint32_t> noted_at;
};

class Board {
 public:
  Board(int rank, std::vector<std::shared_ptr<Mapping>> blocks, std::shared_ptr<Exchange> exchange,
        double timeout);

  // Begins the next collective: announces it, waits until all ranks have announced theirs, and
  // compares. Throws DesyncError.
  void begin(const Announcement& announcement);
  void announce(const Announcement& announcement);
  void meet();    // the second half of begin()
  void arrive();  // and waits for all others to arrive
  void end();

  // Leaves a note that peers read who wait for this rank in vain.
  void leave_note(const std::string& text) noexcept;

  // Tells all ranks that this one can't go on, and throws.
  [[noreturn]] void fail(BoardState state, const std::string& message);
  void post_failure(BoardState state, const std::string& message) noexcept;
  void check_usable();  // throws what broke the communicator, if anything did
  void leave() noexcept;
  void set_timeout(double seconds) { timeout_ = seconds; }
  uint32_t sequence() const { return sequence_; }
  Deadline deadline() const { return deadline_after(timeout_); }

 private:
  ControlBlock& block(int rank) const { return *blocks_[rank]; }
  int size() const { return static_cast<int>(blocks_.size()); }
  void wait_all(Epoch ControlBlock::* epoch, const char* phase);
  void wait(int peer, Epoch ControlBlock::* epoch, Deadline deadline, const char* phase);
  void check_failures();
  void check_states(int peer, Epoch ControlBlock::* epoch);
  void wake_all() const noexcept;
  AnnouncementWords read(int rank, uint32_t sequence) const;
  std::string note_of(int rank, uint32_t sequence) const;
  std::string whereabouts() const;
  std::string farewell() const;  // how a message about a rank that is gone or late ends

  const int rank_;
  double timeout_;
  std::vector<std::shared_ptr<Mapping>> mappings_;
  std::vector<ControlBlock*> blocks_;
  std::shared_ptr<Exchange> exchange_;
  Announcement current_, previous_;
  AnnouncementWords current_words_ = {};
  uint32_t sequence_ = 0;
  std::atomic<bool> closed_{false};  // by close(), possibly on another thread
};

}  // namespace fsdpx
