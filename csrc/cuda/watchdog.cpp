#include "watchdog.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "../check.h"
#include "device_stream.h"

namespace fsdpx::cuda {

using Clock = std::chrono::steady_clock;

struct Watchdog::State {
  struct Item {
    std::shared_ptr<Event> event;
    std::string what;
    Clock::time_point deadline;
  };

  int device;
  double limit;
  std::function<std::string()> problem;
  std::function<void(const std::string&)> on_failure;
  std::mutex mutex;
  std::condition_variable stopping;
  std::deque<Item> items;
  std::optional<Item> call;  // without an event
  bool stopped = false;
  std::thread thread;

  Item until_limit(std::shared_ptr<Event> event, std::string what) const {
    const auto limit = std::chrono::duration<double>(std::min(this->limit, 1e8));
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
    return {std::move(event), std::move(what), deadline};
  }
  void start(const std::shared_ptr<State>& self) {
    if (!thread.joinable()) thread = std::thread([self] { self->run(); });
  }
  void run();
  std::string look();
  std::string look_at_call();
};

std::string Watchdog::State::look_at_call() {
  std::lock_guard lock(mutex);
  if (!call.has_value() || Clock::now() < call->deadline) return {};
  return detail::concat(call->what, " did not return within ", limit,
                        " s on the CPU: it may wait for a rank that is slow or stuck; raise the "
                        "time limit if it is only slow");
}

// Without the lock while it calls CUDA, which may wait.
std::string Watchdog::State::look() {
  while (true) {
    Item first;
    {
      std::lock_guard lock(mutex);
      if (items.empty()) break;
      first = items.front();
    }
    if (!first.event->query()) {
      if (Clock::now() < first.deadline) break;
      return detail::concat(first.what, " did not end within ", limit,
                            " s: a rank may be slow or stuck; raise the time limit if it is only "
                            "slow");
    }
    std::lock_guard lock(mutex);
    if (!items.empty()) items.pop_front();  // stop() may have come meanwhile
  }
  const std::string stuck = look_at_call();
  return stuck.empty() ? problem() : stuck;
}

void Watchdog::State::run() {
  watch_over(device);
  // Often enough to be in time, and seldom enough to cost nothing.
  const auto pause = std::chrono::duration<double>(std::clamp(limit / 10, 0.02, 5.0));
  std::unique_lock lock(mutex);
  while (!stopping.wait_for(lock, pause, [this] { return stopped; })) {
    lock.unlock();
    const std::string failure = look();
    if (!failure.empty()) return on_failure(failure);
    lock.lock();
  }
}

Watchdog::Watchdog(int device, double limit, std::function<std::string()> problem,
                   std::function<void(const std::string&)> on_failure)
    : state_(std::make_shared<State>()) {
  state_->device = device;
  state_->limit = limit;
  state_->problem = std::move(problem);
  state_->on_failure = std::move(on_failure);
}

void Watchdog::watch(std::shared_ptr<Event> event, std::string what) {
  std::lock_guard lock(state_->mutex);
  if (state_->stopped) return;
  state_->items.push_back(state_->until_limit(std::move(event), std::move(what)));
  state_->start(state_);
}

Watchdog::Call::Call(Watchdog& watchdog, std::string what) : state_(watchdog.state_) {
  std::lock_guard lock(state_->mutex);
  if (state_->stopped) return;
  state_->call = state_->until_limit(nullptr, std::move(what));
  state_->start(state_);
}

Watchdog::Call::~Call() {
  std::lock_guard lock(state_->mutex);
  state_->call.reset();
}

void Watchdog::stop() {
  std::thread thread;
  {
    std::lock_guard lock(state_->mutex);
    state_->stopped = true;
    thread.swap(state_->thread);
    state_->items.clear();
  }
  state_->stopping.notify_all();
  if (thread.joinable()) thread.join();
}

Watchdog::~Watchdog() {
  std::lock_guard lock(state_->mutex);
  state_->stopped = true;
  state_->stopping.notify_all();
  if (state_->thread.joinable()) state_->thread.detach();  // it owns the state and ends by itself
}

}  // namespace fsdpx::cuda
