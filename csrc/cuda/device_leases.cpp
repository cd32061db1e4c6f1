#include "device_leases.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

namespace fsdpx::cuda {
namespace {

// The first word is not zero once a rank has unmapped everything. In the others, by number of the
// region, stands the latest one that it unmapped. A later region in the same word hides an earlier
// one, which then stays parked: harmless, and there are more words than a program has regions.
constexpr int64_t kWords = 1024;

struct Parked {
  std::shared_ptr<void> memory;
  std::shared_ptr<const Leases> leases;
  int64_t region;
};

struct Lot {
  std::mutex mutex;
  std::vector<Parked> parked;
};

Lot& lot() {
  static Lot& only = *new Lot;  // never destroyed: at exit CUDA is gone
  return only;
}

}  // namespace

Leases::Leases(const Surroundings& surroundings)
    : rank_(surroundings.rank()),
      size_(surroundings.size()),
      pid_(getpid()),
      parts_(shared_words(surroundings, kWords * static_cast<int64_t>(sizeof(Word)))) {}

Leases::Word& Leases::word(int rank, int64_t number) const {
  return static_cast<Word*>(parts_[rank].get())[number];
}

bool Leases::is_ours() const { return getpid() == pid_; }

void Leases::give_up(int64_t region) noexcept {
  if (!is_ours()) return;
  word(rank_, 1 + region % (kWords - 1)).store(region, std::memory_order_release);
  free_parked();
}

void Leases::give_up_all() noexcept {
  if (!is_ours()) return;
  word(rank_, 0).store(1, std::memory_order_release);
  free_parked();
}

bool Leases::given_up(int64_t region) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (word(rank, 0).load(std::memory_order_acquire) != 0) continue;
    const Word& latest = word(rank, 1 + region % (kWords - 1));
    if (latest.load(std::memory_order_acquire) != region) return false;
  }
  return true;
}

bool Leases::all_given_up() const {
  for (int rank = 0; rank < size_; ++rank) {
    if (word(rank, 0).load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

void park(std::shared_ptr<void> memory, std::shared_ptr<const Leases> leases, int64_t region) {
  {
    std::lock_guard lock(lot().mutex);
    lot().parked.push_back({std::move(memory), std::move(leases), region});
  }
  free_parked();
}

int64_t free_parked() noexcept {
  std::vector<Parked> free;  // without the lock, which CUDA may keep for a while
  std::lock_guard lock(lot().mutex);
  auto& parked = lot().parked;
  const auto mapped = std::partition(parked.begin(), parked.end(), [](const Parked& p) {
    return !p.leases->given_up(p.region) || !p.leases->is_ours();
  });
  std::move(mapped, parked.end(), std::back_inserter(free));
  parked.erase(mapped, parked.end());
  return std::ssize(parked);
}

bool wait_for_parked(double seconds) noexcept {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  while (free_parked() != 0) {
    if (std::chrono::duration<double>(Clock::now() - begin).count() > seconds) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace fsdpx::cuda
