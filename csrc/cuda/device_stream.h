// A communication stream on a GPU: a CUDA stream and its events. Nothing here waits on the host
// but close() and Event::ended_within().
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../stream.h"

namespace fsdpx::cuda {

// Throws std::runtime_error with CUDA's own words and `what` was tried. The error is reported then:
// no later launch takes it for its own.
void check_cuda(cudaError_t error, const char* what);

// Makes `device` the calling thread's for a scope. Whatever makes or records an event, launches,
// frees, or names a stream needs it: torch's default stream is null, which means that of the
// current device, and a thread begins with device 0, which would get a context of its own.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = -1;
};

// For a thread that only looks after `device`: it is the thread's from here on, and what the thread
// asks does no harm to a graph that is being captured elsewhere. Never throws.
void watch_over(int device) noexcept;

// Which stream the caller computes on: torch's current one.
using CurrentStream = cudaStream_t (*)(int device);

// Events are used again, so that a step makes none. They are never destroyed: their number is that
// of the collectives in flight at most, and the last ones go when CUDA itself may be gone.
class EventPool {
 public:
  explicit EventPool(unsigned flags) : flags_(flags) {}
  cudaEvent_t take();
  void give(cudaEvent_t event);

 private:
  const unsigned flags_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

// Times of a GPU on the host's clock, by events that are looked at when they are asked for. The
// first one of a while waits for the GPU, to bring the clocks together.
class DeviceClock : public std::enable_shared_from_this<DeviceClock> {
 public:
  explicit DeviceClock(int device) : device_(device) {}
  Instant at_end_of(cudaStream_t stream);

 private:
  struct Anchor {
    cudaEvent_t event;
    int64_t ns;
  };
  class Point;
  const int device_;
  EventPool pool_{cudaEventDefault};
  std::mutex mutex_;
  std::shared_ptr<const Anchor> anchor_;
};

class DeviceEvent final : public Event {
 public:
  // Records on `stream`; `error` is what the task threw. `current` is the stream that wait() holds.
  DeviceEvent(int device, std::shared_ptr<EventPool> pool, cudaStream_t stream,
              CurrentStream current, std::exception_ptr error = nullptr);
  ~DeviceEvent() override;
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  bool query() const override;
  bool ended_within(double seconds) override;
  void wait(double seconds, const std::function<void()>& meanwhile = {}) override;
  bool is_followed() const override;
  void hold(cudaStream_t stream) const;  // what is enqueued there from now on begins later

  std::vector<cudaStream_t> waited() const;  // the streams of those who called wait()

 private:
  const int device_;
  const std::shared_ptr<EventPool> pool_;
  const CurrentStream current_;
  const cudaEvent_t event_;
  const std::exception_ptr error_;
  std::atomic<cudaStream_t> latest_{cudaStreamPerThread};  // of waited_; that is none of torch's
  mutable std::mutex mutex_;
  std::vector<cudaStream_t> waited_;
};

class DeviceStream final : public Stream {
 public:
  DeviceStream(int device, cudaStream_t stream, CurrentStream current);

  int device() const { return device_; }
  cudaStream_t get() const { return stream_; }
  cudaStream_t current() const { return current_(device_); }

  // Runs `task` now, on the calling thread: it enqueues on get(). What it throws goes into the
  // event.
  std::shared_ptr<Event> enqueue(std::function<void()> task) override;
  void close(double seconds) override;
  std::shared_ptr<Event> mark() override;
  void follow(const Event& mark) override;
  std::vector<std::shared_ptr<Event>> marks_of_users(const Event& event) override;
  Clock clock() override;
  Instant computed() override;

  std::shared_ptr<DeviceEvent> record();  // the end of what is on get() now

  // `first`, then `then`: what is enqueued on `then` from now on begins after what is on `first`.
  void order(cudaStream_t first, cudaStream_t then);

 private:
  void check_not_captured() const;

  const int device_;
  const cudaStream_t stream_;
  const CurrentStream current_;
  const int pid_;
  const std::shared_ptr<EventPool> pool_ = std::make_shared<EventPool>(cudaEventDisableTiming);
  const std::shared_ptr<DeviceClock> clock_;
  std::mutex mutex_;
  bool closed_ = false;
  std::shared_ptr<Event> latest_;
};

}  // namespace fsdpx::cuda
