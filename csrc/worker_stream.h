// A communication stream on CPU: one worker thread that runs tasks in the order they were issued,
// and events to wait for them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "stream.h"

namespace fsdpx {

class WorkerEvent final : public Event {
 public:
  bool query() const override;
  bool ended_within(double seconds) override;
  void wait(double seconds, const std::function<void()>& meanwhile = {}) override;

 private:
  friend class WorkerStream;
  void finish(std::exception_ptr error);
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<bool> done_ = false;
  std::exception_ptr error_;
};

class WorkerStream final : public Stream {
 public:
  explicit WorkerStream(std::string name);  // the thread starts with the first task
  ~WorkerStream() override;                 // never waits for tasks: see close()
  WorkerStream(const WorkerStream&) = delete;
  WorkerStream& operator=(const WorkerStream&) = delete;

  std::shared_ptr<Event> enqueue(std::function<void()> task) override;

  // Runs what is queued for at most `seconds`, drops the rest (their events end with an error) and
  // joins the thread.
  void close(double seconds) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fsdpx
