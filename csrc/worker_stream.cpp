#include "worker_stream.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include "check.h"

namespace fsdpx {
namespace {

using Clock = std::chrono::steady_clock;

// A limit as a point in time. Limits of more than ten years count as none: adding them to now would
// overflow.
Clock::time_point deadline_after(double seconds) {
  constexpr double kLongest = 10.0 * 365 * 24 * 3600;
  if (!(seconds < kLongest)) seconds = kLongest;
  return Clock::now() +
         std::chrono::nanoseconds(static_cast<int64_t>(std::max(seconds, 0.0) * 1e9));
}

// Putting a thread to sleep and waking it costs more than the collective of a small unit takes. So
// who waits looks a few times before it sleeps, giving way to other threads in between.
template <typename Ready>
bool becomes_true_soon(const Ready& ready) {
  constexpr auto kLookingTime = std::chrono::microseconds(20);
  const auto end = Clock::now() + kLookingTime;
  do {
    if (ready()) return true;
    std::this_thread::yield();
  } while (Clock::now() < end);
  return false;
}

}  // namespace

bool WorkerEvent::query() const { return done_.load(std::memory_order_acquire); }

bool WorkerEvent::ended_within(double seconds) {
  if (becomes_true_soon([this] { return query(); })) return true;
  std::unique_lock lock(mutex_);
  return ended_.wait_until(lock, deadline_after(seconds), [this] { return query(); });
}

// In short pieces, so that `meanwhile` can look for Ctrl-C.
void WorkerEvent::wait(double seconds, const std::function<void()>& meanwhile) {
  constexpr double kPiece = 0.1;
  for (double left = seconds; !ended_within(std::min(std::max(left, 0.0), kPiece));
       left -= kPiece) {
    check<CommTimeout>(left > kPiece, "a task of the communication stream did not end within ",
                       seconds,
                       " s. A peer may be slow or stuck; raise the time limit if it is only slow.");
    if (meanwhile) meanwhile();
  }
  if (error_) std::rethrow_exception(error_);
}

void WorkerEvent::finish(std::exception_ptr error) {
  {
    std::lock_guard lock(mutex_);
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
  }
  ended_.notify_all();
}

struct WorkerStream::State {
  struct Item {
    std::function<void()> task;
    std::shared_ptr<WorkerEvent> event;
  };

  std::string name;
  const pid_t pid = getpid();
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> items;
  std::atomic<int64_t> num_issued = 0;  // tasks so far
  bool closed = false;                  // takes no more tasks
  bool dropping = false;                // the worker runs no more tasks
  bool ended = true;                    // no worker runs
  // A plain pointer: in a forked child the thread is gone, and destroying or detaching its handle
  // there is undefined.
  std::thread* worker = nullptr;

  bool in_child() const { return getpid() != pid; }
  void start(const std::shared_ptr<State>& self);
  void run();
  void drop_items();
};

void WorkerStream::State::start(const std::shared_ptr<State>& self) {
  // Signals belong to the threads that the program knows of (Python handles them in its main
  // thread).
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    worker = new std::thread([self] { self->run(); });
    ended = false;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(worker->native_handle(), name.substr(0, 15).c_str());
}

void WorkerStream::State::run() {
  std::unique_lock lock(mutex);
  int64_t num_run = 0;
  while (true) {
    if (items.empty() && !closed) {
      lock.unlock();
      becomes_true_soon([&] { return num_issued.load(std::memory_order_relaxed) > num_run; });
      lock.lock();
    }
    changed.wait(lock, [this] { return !items.empty() || closed || dropping; });
    if (dropping || items.empty()) break;
    Item item = std::move(items.front());
    items.pop_front();
    ++num_run;
    lock.unlock();
    std::exception_ptr error;
    try {
      item.task();
    } catch (...) {
      error = std::current_exception();
    }
    item.task =
        nullptr;  // first: who waits for the event may count on what the task owned being free
    item.event->finish(std::move(error));
    item.event.reset();
    lock.lock();
  }
  ended = true;
  changed.notify_all();
}

// Ends all queued events with an error. Called without the lock: closures may own anything.
void WorkerStream::State::drop_items() {
  std::deque<Item> dropped;
  {
    std::lock_guard lock(mutex);
    dropped.swap(items);
  }
  for (Item& item : dropped) {
    item.task = nullptr;
    item.event->finish(std::make_exception_ptr(std::runtime_error(
        "fsdpx: the communication stream '" + name + "' was closed before this task ran")));
  }
}

WorkerStream::WorkerStream(std::string name) : state_(std::make_shared<State>()) {
  state_->name = std::move(name);
}

WorkerStream::~WorkerStream() {
  if (state_->in_child()) return;
  {
    std::lock_guard lock(state_->mutex);
    state_->closed = state_->dropping = true;
    if (state_->worker != nullptr) {
      state_->worker->detach();  // it owns the state and ends by itself
      delete std::exchange(state_->worker, nullptr);
    }
  }
  state_->changed.notify_all();
  state_->drop_items();
}

std::shared_ptr<Event> WorkerStream::enqueue(std::function<void()> task) {
  // Before the lock: in a child, the thread that holds it may not exist.
  check<std::runtime_error>(!state_->in_child(), "the communication stream '", state_->name,
                            "' belongs to process ", state_->pid,
                            ". A forked child can't run collectives; start workers with 'spawn' or "
                            "'forkserver', or create the process group in the child.");
  auto event = std::make_shared<WorkerEvent>();
  {
    std::lock_guard lock(state_->mutex);
    check<std::runtime_error>(!state_->closed, "the communication stream '", state_->name,
                              "' is closed");
    if (state_->worker == nullptr) state_->start(state_);
    state_->items.push_back({std::move(task), event});
    state_->num_issued.fetch_add(1, std::memory_order_relaxed);
  }
  state_->changed.notify_all();
  return event;
}

void WorkerStream::close(double seconds) {
  if (state_->in_child()) return;
  const auto deadline = deadline_after(seconds);
  std::unique_lock lock(state_->mutex);
  state_->closed = true;
  state_->changed.notify_all();
  const bool own =
      state_->worker != nullptr && state_->worker->get_id() == std::this_thread::get_id();
  check<std::runtime_error>(!own, "a task can't close the stream that runs it");
  state_->changed.wait_until(lock, deadline, [this] { return state_->ended; });
  state_->dropping = true;
  state_->changed.notify_all();
  // A task that is still running can't be stopped from here; a later close(), after its wait was
  // aborted, joins.
  std::thread* finished = state_->ended ? std::exchange(state_->worker, nullptr) : nullptr;
  lock.unlock();
  state_->drop_items();
  if (finished != nullptr) {
    finished->join();
    delete finished;
  }
}

}  // namespace fsdpx
