#include "shm_board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include "check.h"

namespace fsdpx {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);  // how often a sleeper looks around
constexpr int kSpins =
    60;  // a few microseconds: ranks share cores with each other and with compute threads
static_assert(Epoch::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

uint32_t* word_of(Epoch& epoch) { return reinterpret_cast<uint32_t*>(&epoch); }

void futex_wait(Epoch& epoch, uint32_t seen, std::chrono::nanoseconds limit) {
  const timespec time = {static_cast<time_t>(limit.count() / 1'000'000'000),
                         static_cast<long>(limit.count() % 1'000'000'000)};
  syscall(SYS_futex, word_of(epoch), FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake(Epoch& epoch) {
  syscall(SYS_futex, word_of(epoch), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void raise(Epoch& epoch, uint32_t sequence) {
  epoch.store(sequence, std::memory_order_release);
  futex_wake(epoch);
}

bool reached(const Epoch& epoch, uint32_t sequence) {
  return static_cast<int32_t>(epoch.load(std::memory_order_acquire) - sequence) >= 0;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

[[noreturn]] void throw_state(BoardState state, const std::string& message) {
  if (state == BoardState::kDesync) throw DesyncError(message);
  if (state == BoardState::kTimeout) throw CommTimeout(message);
  throw std::runtime_error(message);
}

}  // namespace

Board::Board(int rank, std::vector<std::shared_ptr<Mapping>> blocks,
             std::shared_ptr<Exchange> exchange, double timeout)
    : rank_(rank), timeout_(timeout), mappings_(std::move(blocks)), exchange_(std::move(exchange)) {
  for (const auto& mapping : mappings_)
    blocks_.push_back(static_cast<ControlBlock*>(mapping->data()));
}

void Board::begin(const Announcement& announcement) {
  check_failures();  // a rank that comes late hears why the others gave up, not that it differs
  announce(announcement);
  meet();
}

void Board::announce(const Announcement& announcement) {
  previous_ = std::exchange(current_, announcement);
  current_words_ = encode(announcement);
  ++sequence_;
  auto& slot = block(rank_).slots[sequence_ & 1];
  for (int i = 0; i < kAnnouncementWords; ++i)
    slot[i].store(current_words_[i], std::memory_order_relaxed);
  raise(block(rank_).ready, sequence_);
}

AnnouncementWords Board::read(int rank, uint32_t sequence) const {
  AnnouncementWords words;
  const auto& slot = block(rank).slots[sequence & 1];
  for (int i = 0; i < kAnnouncementWords; ++i) words[i] = slot[i].load(std::memory_order_relaxed);
  return words;
}

void Board::meet() {
  wait_all(&ControlBlock::ready, "announce it");
  for (int peer = 0; peer < size(); ++peer) {
    const AnnouncementWords theirs = read(peer, sequence_);
    if (theirs[0] != current_words_[0])
      fail(BoardState::kDesync,
           desync_message(sequence_, rank_, current_, peer, decode(theirs), previous_));
  }
}

void Board::arrive() {
  raise(block(rank_).arrived, sequence_);
  wait_all(&ControlBlock::arrived, "send its part");
}

void Board::end() { block(rank_).done.store(sequence_, std::memory_order_release); }

void Board::wait_all(Epoch ControlBlock::* epoch, const char* phase) {
  const Deadline limit = deadline();
  for (int i = 1; i < size(); ++i) wait((rank_ + i) % size(), epoch, limit, phase);
}

void Board::wait(int peer, Epoch ControlBlock::* epoch, Deadline deadline, const char* phase) {
  Epoch& word = block(peer).*epoch;
  for (int i = 0; i < kSpins; ++i) {
    if (reached(word, sequence_)) return;
    relax();
  }
  while (true) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (reached(word, sequence_)) return;
    check_states(peer, epoch);
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= left.zero()) {
      fail(BoardState::kTimeout,
           detail::concat("fsdpx: rank ", rank_, " waited ", timeout_, " s for rank ", peer, " to ",
                          phase, " in collective ", sequence_, ", ", describe(current_), ".",
                          farewell(),
                          " If that rank is only slow, raise the time limit of the process "
                          "group."));
    }
    futex_wait(word, seen, std::min<std::chrono::nanoseconds>(left, kSlice));
  }
}

void Board::check_failures() {
  for (int rank = 0; rank < size(); ++rank) {
    const auto state = BoardState(block(rank).state.load(std::memory_order_acquire));
    if (state == BoardState::kRunning || state == BoardState::kLeft) continue;
    const std::string message = block(rank).message;
    post_failure(state, message);
    throw_state(state, message);
  }
}

// What ends a wait early: a rank that can't go on, or a peer that is not there any more.
void Board::check_states(int peer, Epoch ControlBlock::* epoch) {
  check<std::runtime_error>(!closed_.load(std::memory_order_relaxed),
                            "the communicator was closed on this rank while it waited in ",
                            describe(current_));
  check_failures();
  const auto state = BoardState(block(peer).state.load(std::memory_order_acquire));
  // It may have finished this collective before it left.
  if (reached(block(peer).*epoch, sequence_)) return;
  if (state == BoardState::kLeft) {
    fail(BoardState::kDesync,
         detail::concat("fsdpx: rank ", peer, " has left; rank ", rank_, " waits for it in ",
                        describe(current_), ", collective ", sequence_, ".", farewell()));
  }
  if (!exchange_->alive(peer) && !reached(block(peer).*epoch, sequence_)) {
    fail(BoardState::kDesync,
         detail::concat("fsdpx: the process of rank ", peer, " has ended; rank ", rank_,
                        " waits for it in ", describe(current_), ", collective ", sequence_, ".",
                        farewell()));
  }
}

std::string Board::whereabouts() const {
  std::string text = "Ranks:";
  for (int rank = 0; rank < size(); ++rank) {
    const ControlBlock& b = block(rank);
    const uint32_t ready = b.ready.load(std::memory_order_acquire);
    const bool idle = b.done.load(std::memory_order_acquire) == ready;
    const bool arrived = reached(b.arrived, ready);
    const Announcement a = decode(read(rank, ready));
    text += detail::concat(rank == 0 ? " " : "; ", rank, idle ? " has finished " : " is in ", ready,
                           " (", describe_briefly(a), !idle && arrived ? ", its part sent" : "",
                           ")", note_of(rank, ready));
  }
  return text + ".";
}

std::string Board::farewell() const {
  return detail::concat(" ", whereabouts(), last_alike(previous_), kWayOn);
}

void Board::leave_note(const std::string& text) noexcept {
  ControlBlock& own = block(rank_);
  char chars[kNoteWords * 8] = {};
  std::memcpy(chars, text.data(), std::min(text.size(), sizeof(chars) - 1));
  for (int i = 0; i < kNoteWords; ++i) {
    uint64_t word;
    std::memcpy(&word, chars + 8 * i, 8);
    own.note[i].store(word, std::memory_order_relaxed);
  }
  own.noted_at.store(sequence_, std::memory_order_release);
}

std::string Board::note_of(int rank, uint32_t sequence) const {
  const ControlBlock& b = block(rank);
  if (b.noted_at.load(std::memory_order_acquire) != sequence) return "";
  char chars[kNoteWords * 8];
  for (int i = 0; i < kNoteWords; ++i) {
    const uint64_t word = b.note[i].load(std::memory_order_relaxed);
    std::memcpy(chars + 8 * i, &word, 8);
  }
  chars[sizeof(chars) - 1] = 0;
  return *chars == 0 ? "" : detail::concat(" and then ", static_cast<const char*>(chars));
}

void Board::wake_all() const noexcept {
  for (ControlBlock* b : blocks_)
    for (Epoch* epoch : {&b->ready, &b->arrived}) futex_wake(*epoch);
}

void Board::post_failure(BoardState state, const std::string& message) noexcept {
  ControlBlock& own = block(rank_);
  if (own.state.load(std::memory_order_relaxed) != uint32_t(BoardState::kRunning)) return;
  const size_t length = std::min<size_t>(message.size(), kMessageChars - 1);
  std::memcpy(own.message, message.data(), length);
  own.message[length] = 0;
  // Unless close() on another thread was first.
  uint32_t running = uint32_t(BoardState::kRunning);
  own.state.compare_exchange_strong(running, uint32_t(state), std::memory_order_release);
  wake_all();
}

void Board::fail(BoardState state, const std::string& message) {
  post_failure(state, message);
  throw_state(state, message);
}

void Board::check_usable() {
  check<std::runtime_error>(!closed_.load(std::memory_order_relaxed), "the communicator is closed");
  const auto state = BoardState(block(rank_).state.load(std::memory_order_acquire));
  if (state != BoardState::kRunning) throw_state(state, block(rank_).message);
}

// A failure stays posted: to peers that still wait it says more than that this rank has left.
void Board::leave() noexcept {
  closed_.store(true, std::memory_order_relaxed);
  uint32_t running = uint32_t(BoardState::kRunning);
  block(rank_).state.compare_exchange_strong(running, uint32_t(BoardState::kLeft),
                                             std::memory_order_release);
  wake_all();
}

}  // namespace fsdpx
