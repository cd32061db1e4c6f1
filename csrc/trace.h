// The timeline recorder: what ran when, on which lane. Off by default; when off, recording is one
// relaxed load.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fsdpx {

int64_t now_ns();  // steady clock; the same epoch in all processes of one host

// A point in time that may lie ahead: on a GPU, when a stream has come to it.
class TimePoint {
 public:
  virtual ~TimePoint() = default;
  virtual int64_t ns() = 0;  // on the clock of now_ns(); waits for it
};

struct Instant {
  Instant(int64_t ns = 0) : ns(ns) {}  // NOLINT: times are instants
  explicit Instant(std::shared_ptr<TimePoint> later) : later(std::move(later)) {}

  int64_t ns = 0;                    // when `later` is null
  std::shared_ptr<TimePoint> later;  // else

  void resolve() {
    if (later != nullptr) *this = Instant(later->ns());
  }
};

// Tells the time as a stream sees it: when what has been enqueued there so far has run.
using Clock = std::function<Instant()>;

struct TraceEvent {
  const char* lane;  // "compute", "comm" or "resident" (static strings)
  std::string unit;
  std::string
      operation;  // "all_gather", "reduce_scatter", "forward", "backward", "wait", "full", ...
  Instant issue;  // when it was asked for; `begin` when that means nothing
  Instant begin;
  Instant end;
  int64_t wire_bytes;  // bytes that this rank sends (all-gather) or receives (reduce-scatter): (D -
                       // 1) / D of the unit
};

class Recorder {
 public:
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void enable(bool on) { enabled_.store(on, std::memory_order_relaxed); }
  void record(TraceEvent event);  // dropped when off
  // Events so far, in order of recording, their instants resolved (which waits for them); the
  // recorder is empty afterwards.
  std::vector<TraceEvent> take();

 private:
  std::atomic<bool> enabled_{false};
  std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

}  // namespace fsdpx
