#include "trace.h"

#include <chrono>
#include <utility>

namespace fsdpx {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Recorder::record(TraceEvent event) {
  if (!enabled()) return;
  std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
}

std::vector<TraceEvent> Recorder::take() {
  std::vector<TraceEvent> taken;
  {
    std::lock_guard lock(mutex_);
    taken = std::exchange(events_, {});
  }
  for (TraceEvent& event : taken)
    for (Instant* instant : {&event.issue, &event.begin, &event.end}) instant->resolve();
  return taken;
}

}  // namespace fsdpx
