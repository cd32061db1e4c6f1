// Which operation of which stream runs next, and the virtual clock.
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "sim.h"

namespace sim {

std::vector<Stream*>& streams = *new std::vector<Stream*>;
double host_us = 0;

namespace {

struct Span {
  int rank, device, stream;
  std::string name;
  double start, end, bytes;
};
std::vector<Span>& spans = *new std::vector<Span>;
int current_clock = 0;

// Waits of streams for events since the last reset, and which of them are left out.
struct Wait {
  int stream, event_stream;
  std::string event_after, before;  // the operations that it orders
};
std::vector<Wait>& waits = *new std::vector<Wait>;
size_t dropped_period = 0;  // of each so many waits, those of `dropped` are left out
std::vector<size_t>& dropped = *new std::vector<size_t>;

Stream* legacy_stream(int owner) {
  static auto& legacy = *new std::map<int, Stream*>;
  Stream*& s = legacy[owner];
  if (!s) s = new_stream(owner);
  return s;
}

bool ready(Stream* s) {
  if (s->queue.empty()) return false;
  Op& op = s->queue.front();
  if (op.wait) {
    if (!op.wait->done) return false;
    op.not_before = op.wait->clock == current_clock ? op.wait->time : 0;
  }
  return !op.ready || op.ready(op);
}

void finish(const RecordPtr& record, double time) {
  if (!record) return;
  record->done = true;
  record->time = time;
  record->clock = current_clock;
}

void step(Stream* s) {
  const Op op = std::move(s->queue.front());
  s->queue.pop_front();
  const double start = s->time = std::max({s->time, op.host_us, op.not_before});
  const double bytes = op.run ? op.run() : 0;
  s->time = start + op.fixed_us + (op.rate > 0 ? bytes / op.rate : 0);
  finish(op.record, s->time);
  const int rank = multi_process() ? int(settings.slot) : s->device;
  if (op.traced) spans.push_back({rank, s->device, s->id, op.name, start, s->time, bytes});
}

// In random order each stream has a character, from the seed: 0 runs late, 3 runs early. Orders in
// which one stream is far behind another are the ones that show a missing dependency, and a fair
// choice at every step seldom makes them.
int eagerness(const Stream* s) {
  uint32_t x = uint32_t(settings.seed) * 0x9E3779B9u + uint32_t(s->id + 1) * 0x85EBCA6Bu;
  x = (x ^ x >> 16) * 0x85EBCA6Bu;
  x = (x ^ x >> 13) * 0xC2B2AE35u;
  return int((x ^ x >> 16) & 3);
}

bool step_random() {
  Stream* best = nullptr;
  int high = -1;
  for (Stream* s : streams) {
    if (fault.code || !ready(s)) continue;
    const int score = 4 * eagerness(s) + random_below(8);
    if (score > high) {
      high = score;
      best = s;
    }
  }
  if (!best || fault.code) return false;
  step(best);
  return true;
}

// Random order: what the device does while the host goes on.
void step_unasked() {
  for (Stream* s : streams) {
    if (random_below(4) < eagerness(s) && ready(s) && !fault.code) return step(s);
  }
}

// All that can run now (eager).
void advance() {
  while (step_first()) {
  }
  if (fault.code) drop_everything();
}

// The stream to run next so that `s` gets on, and nothing else; nullptr if others decide that.
Stream* needed_by(Stream* s) {
  for (size_t hops = 0; s && hops <= streams.size(); ++hops) {
    if (ready(s)) return s;
    if (s->queue.empty() || !s->queue.front().wait) return nullptr;
    s = s->queue.front().wait->stream;
  }
  return nullptr;
}

bool step_late(Stream* target, bool stuck) {
  if (fault.code) return false;
  Stream* s = needed_by(target);
  if (stuck || !multi_process()) {
    // The target waits for other ranks. In one process these are other streams. Other processes
    // come by themselves, unless they wait for something else of this process, hence `stuck`.
    for (size_t i = 0; i < streams.size() && !s && !fault.code; ++i) s = needed_by(streams[i]);
  }
  if (s && !fault.code) step(s);
  return s != nullptr;
}

std::string stuck_at() {
  std::string text;
  for (const Stream* s : streams) {
    if (s->queue.empty()) continue;
    const Op& op = s->queue.front();
    text += "; stream " + std::to_string(s->id) + " is at " +
            (op.waiting_for ? op.waiting_for() : op.name);
  }
  return text;
}

bool waits_for_others() {
  return std::any_of(streams.begin(), streams.end(), [](const Stream* s) {
    return !s->queue.empty() && s->queue.front().waiting_for;
  });
}

void note_operation(Stream* s, const std::string& name) {
  s->latest = name;
  for (const size_t number : s->new_waits) waits[number].before = name;
  s->new_waits.clear();
}

void forget_waits() {
  waits.clear();
  for (Stream* s : streams) s->new_waits.clear();
}

}  // namespace

bool note_wait(Stream* s, const Record& event) {
  const size_t number = waits.size();
  waits.push_back({s->id, event.stream->id, event.after, ""});
  s->new_waits.push_back(number);
  return dropped_period && std::count(dropped.begin(), dropped.end(), number % dropped_period);
}

Stream* new_stream(int owner) {
  auto* const s = new Stream;
  s->device = owner;
  s->id = int(streams.size());
  streams.push_back(s);
  return s;
}

Stream* stream_of(cudaStream_t s) {
  const bool legacy = s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread;
  return legacy ? legacy_stream(device) : reinterpret_cast<Stream*>(s);
}

bool step_first() {
  for (Stream* s : streams) {
    if (!fault.code && ready(s) && !fault.code) {
      step(s);
      return true;
    }
  }
  return false;
}

// After a fault nothing more runs, but whoever waits must not wait forever.
void drop_everything() {
  for (Stream* s : streams) {
    for (; !s->queue.empty(); s->queue.pop_front()) finish(s->queue.front().record, s->time);
  }
}

void drive(Stream* target, const std::function<bool()>& done) {
  double since = now_s();
  while (!done()) {
    if (fault.code) return drop_everything();
    const double idle = now_s() - since;
    const bool moved = settings.order == kRandom  ? step_random()
                       : settings.order == kEager ? step_first()
                                                  : step_late(target, idle > settings.stuck_s);
    if (moved) {
      since = now_s();
    } else if (!fault.code && !waits_for_others()) {
      raise(cudaErrorLaunchFailure, "deadlock: nothing can run" + stuck_at());
    } else if (!fault.code && idle > settings.timeout_s) {
      raise(cudaErrorLaunchTimeout, "timeout" + stuck_at());
    } else if (!fault.code) {
      pause_us(20);
    }
  }
}

void push(Stream* s, Op op) {
  enqueues = true;
  spins = 0;
  host_us += settings.call_us;
  op.host_us = host_us;
  if (op.record) {
    op.record->stream = s;
    op.record->after = s->latest;
  }
  if (op.traced) note_operation(s, op.name);
  if (fault.code) return finish(op.record, s->time);
  s->queue.push_back(std::move(op));
  if (settings.order == kEager) advance();
  if (settings.order == kRandom) step_unasked();
}

void poll() {
  if (!enqueues) return;  // a watchdog thread must not change the order
  if (settings.order == kEager) advance();
  if (settings.order == kRandom) step_unasked();
  // A host that spins on a query would wait forever.
  if (settings.order != kEager && ++spins > 64) step_random();
}

bool wait_until(const std::function<bool()>& done) {
  for (const double begin = now_s(); !done(); pause_us(50)) {
    if (now_s() - begin > settings.timeout_s) return false;
    // The others may wait for what is queued here.
    if (now_s() - begin > settings.stuck_s) advance();
  }
  return true;
}

void drain(Stream* s) {
  drive(s, [s] { return s->queue.empty(); });
}
void drain_all() {
  for (size_t i = 0; i < streams.size(); ++i) drain(streams[i]);
}
void sync(Stream* s) {
  count(kHostWaits);
  drain(s);
  host_us = std::max(host_us, s->time);
}
void sync_all() {
  count(kHostWaits);
  drain_all();
  for (const Stream* s : streams) host_us = std::max(host_us, s->time);
}
void reset_streams() {
  host_us = 0;
  ++current_clock;
  spans.clear();
  forget_waits();
  dropped_period = 0;
  for (Stream* s : streams) s->time = 0;
}

}  // namespace sim

// What ran since the last reset, as JSON.
API const char* cudasim_trace() {
  using namespace sim;
  Lock lock;
  drain_all();
  static std::string& json = *new std::string;
  json = "[";
  for (const Span& s : spans) {
    char line[512];
    snprintf(line, sizeof line,
             "%s{\"rank\": %d, \"device\": %d, \"stream\": %d, \"name\": \"%.200s\", "
             "\"start_us\": %.17g, \"end_us\": %.17g, \"bytes\": %.17g}",
             json.size() > 1 ? ",\n" : "", s.rank, s.device, s.stream, s.name.c_str(), s.start,
             s.end, s.bytes);
    json += line;
  }
  json += "]";
  return json.c_str();
}

// Leaves out of each `period` waits of streams for events those with these indices, until a reset.
API void cudasim_drop_waits(size_t period, const size_t* indices, size_t count) {
  sim::Lock lock;
  sim::forget_waits();
  sim::dropped_period = period;
  sim::dropped.assign(indices, indices + count);
}

// Waits of streams for events since the last reset, as JSON.
API const char* cudasim_waits() {
  using namespace sim;
  Lock lock;
  static std::string& json = *new std::string;
  json = "[";
  for (const Wait& w : waits) {
    char line[1024];
    snprintf(line, sizeof line,
             "%s{\"stream\": %d, \"before\": \"%.300s\", \"event_stream\": %d, \"after\": "
             "\"%.300s\"}",
             json.size() > 1 ? ",\n" : "", w.stream, w.before.c_str(), w.event_stream,
             w.event_after.c_str());
    json += line;
  }
  json += "]";
  return json.c_str();
}
