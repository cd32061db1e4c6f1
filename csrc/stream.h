// Communication streams: tasks run in the order of their issue, beside the thread that issues them.
// On CPU a worker thread runs them (worker_stream.h); on a GPU each task enqueues work on a CUDA
// stream (cuda/device_stream.h).
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "trace.h"

namespace fsdpx {

// The end of one task.
class Event {
 public:
  virtual ~Event() = default;

  // True when the task has ended, well or not; never throws and never waits.
  virtual bool query() const = 0;

  // The calling thread waits; false after `seconds`. Never throws what the task threw.
  virtual bool ended_within(double seconds) = 0;

  // From here on the caller may use what the task made: on CPU this waits; on a GPU torch's current
  // stream does, and the call returns at once. Rethrows what the task threw, every time, and throws
  // CommTimeout after `seconds`. While it waits it calls `meanwhile` now and then, which may throw.
  virtual void wait(double seconds, const std::function<void()>& meanwhile = {}) = 0;

  // Whether what the caller does now comes after the end, because its stream has waited for it. On
  // CPU all that happens after a wait() does.
  virtual bool is_followed() const { return true; }
};

class Stream {
 public:
  virtual ~Stream() = default;

  // Runs `task` after all earlier ones. What the closure owns is released when the task has run:
  // on a GPU, when its work has been enqueued. Throws after close() and in a forked child.
  virtual std::shared_ptr<Event> enqueue(std::function<void()> task) = 0;

  // Waits for what is queued for at most `seconds` and takes no more. Idempotent.
  virtual void close(double seconds) = 0;

  // Order with what the caller computes. `mark` is the end of what it has issued so far; tasks
  // enqueued after follow(mark) begin later than that. On CPU the caller has computed it when it
  // calls: there is nothing to wait for, and the mark is null.
  virtual std::shared_ptr<Event> mark() { return nullptr; }
  virtual void follow(const Event& mark) { (void)mark; }
  // Marks of the caller's stream and of all others that have waited for `event`: those who may use
  // what it made.
  virtual std::vector<std::shared_ptr<Event>> marks_of_users(const Event& event) {
    (void)event;
    return {};
  }

  // For the timeline. `clock` is of this stream and may outlive it; `computed` is when the caller
  // has computed what it has issued so far.
  virtual Clock clock() { return now_ns; }
  virtual Instant computed() { return now_ns(); }
};

}  // namespace fsdpx
