// A communication stream on CPU: one worker thread that runs tasks in the order they were issued,
// and events to wait for them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace fsdpx {

// The end of one task. Waiting rethrows what the task threw, every time.
class Event {
 public:
  bool query() const;  // true when the task has ended, well or not; never throws
  bool ended_within(
      double seconds);        // waits; false after `seconds`; never throws what the task threw
  void wait(double seconds);  // throws CommTimeout after `seconds`
  [[noreturn]] static void throw_timeout(double seconds);

 private:
  friend class Stream;
  void finish(std::exception_ptr error);
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<bool> done_ = false;
  std::exception_ptr error_;
};

class Stream {
 public:
  explicit Stream(std::string name);  // the thread starts with the first task
  ~Stream();                          // never waits for tasks: see close()
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Runs `task` after all earlier ones. What the closure owns is released when the task has ended.
  // Throws after close() and in a forked child.
  std::shared_ptr<Event> enqueue(std::function<void()> task);

  // Runs what is queued for at most `seconds`, drops the rest (their events end with an error) and
  // joins the thread. Idempotent.
  void close(double seconds);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fsdpx
