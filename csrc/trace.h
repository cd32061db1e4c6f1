// The timeline recorder: what ran when, on which lane. Off by default; when off, recording is one
// relaxed load.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace fsdpx {

int64_t now_ns();  // steady clock; the same epoch in all processes of one host

struct TraceEvent {
  const char* lane;  // "compute", "comm" or "resident" (static strings)
  std::string unit;
  std::string
      operation;     // "all_gather", "reduce_scatter", "forward", "backward", "wait", "full", ...
  int64_t issue_ns;  // when it was asked for; begin_ns when that means nothing
  int64_t begin_ns;
  int64_t end_ns;
  int64_t wire_bytes;  // bytes that this rank sends (all-gather) or receives (reduce-scatter): (D -
                       // 1) / D of the unit
};

class Recorder {
 public:
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void enable(bool on) { enabled_.store(on, std::memory_order_relaxed); }
  void record(TraceEvent event);  // dropped when off
  std::vector<TraceEvent>
  take();  // events so far, in order of recording; the recorder is empty afterwards
 private:
  std::atomic<bool> enabled_{false};
  std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

}  // namespace fsdpx
