// Settings, the lock, faults, counters, and the functions that Python calls (cudasim_*).
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>

#include "ptx.h"
#include "sim.h"

namespace sim {

Settings settings;
thread_local int device = 0;
std::atomic<uint64_t> contexts{0};
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool enqueues = false;
thread_local int spins = 0;
Fault& fault = *new Fault;

namespace {

std::mutex mutex;
thread_local int depth = 0;
std::mt19937 rng(1);
uint64_t counters[kNumCounters] = {};
int64_t allocations_until_failure = -1;
std::atomic<double> last_call{0};  // of a thread that enqueues

const std::map<std::string, double Settings::*>& fields() {
  static const auto& known = *new std::map<std::string, double Settings::*>{
      {"order", &Settings::order},           {"seed", &Settings::seed},
      {"devices", &Settings::devices},       {"slot", &Settings::slot},
      {"memory_mb", &Settings::memory_mb},   {"arch", &Settings::arch},
      {"timeout_s", &Settings::timeout_s},   {"idle_s", &Settings::idle_s},
      {"stuck_s", &Settings::stuck_s},       {"mem_gbps", &Settings::mem_gbps},
      {"host_gbps", &Settings::host_gbps},   {"link_gbps", &Settings::link_gbps},
      {"launch_us", &Settings::launch_us},   {"link_us", &Settings::link_us},
      {"call_us", &Settings::call_us},       {"capturing", &Settings::capturing},
      {"nvlink", &Settings::nvlink},         {"nccl_windows", &Settings::nccl_windows},
      {"nccl_hangs", &Settings::nccl_hangs}, {"nccl_absent", &Settings::nccl_absent}};
  return known;
}

double parse(const std::string& text) {
  if (text == "eager") return kEager;
  if (text == "late") return kLate;
  return text == "random" ? kRandom : atof(text.c_str());
}

// Each rank has an order of its own.
void seed_random() { rng.seed(unsigned(settings.seed) * 1009u + unsigned(settings.slot)); }

void read_environment() {
  for (const auto& [field, member] : fields()) {
    std::string name = "CUDASIM_" + field;
    std::transform(name.begin(), name.end(), name.begin(), ::toupper);
    if (const char* value = getenv(name.c_str())) settings.*member = parse(value);
  }
  seed_random();
}

// A host that waits for another rank by other means (a store, a socket) makes no calls, and that
// rank may wait for what is queued here. So after a while of silence, it runs.
void run_while_host_is_silent() {
  for (;; usleep(10000)) {
    while (now_s() - last_call > settings.idle_s && mutex.try_lock()) {
      const bool moved = step_first();
      mutex.unlock();
      if (!moved) break;
    }
  }
}

void start() {
  static const bool once = [] {
    read_environment();
    start_memory();
    last_call = now_s();
    if (multi_process()) std::thread(run_while_host_is_silent).detach();
    return true;
  }();
  (void)once;
}

// Gives Python's GIL away for as long as it lives, if this thread has it.
class WithoutGil {
 public:
  WithoutGil() {
    static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto save =
        reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (check && check()) thread_ = save();
  }
  ~WithoutGil() {
    static const auto restore =
        reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (thread_) restore(thread_);
  }

 private:
  void* thread_ = nullptr;
};

void take_mutex() {
  while (!mutex.try_lock()) {
    const WithoutGil waiting;
    usleep(20);
  }
}

}  // namespace

Lock::Lock() {
  start();
  if (enqueues) last_call = now_s();
  if (depth++ == 0) take_mutex();
}
Lock::~Lock() {
  if (enqueues) last_call = now_s();  // after a long wait in the call, too
  if (--depth == 0) mutex.unlock();
}

void pause_us(int us) {
  mutex.unlock();
  {
    const WithoutGil waiting;
    usleep(static_cast<unsigned>(us));
  }
  if (enqueues) last_call = now_s();
  take_mutex();
}

void enter_context() { contexts |= uint64_t{1} << device; }

int random_below(int n) { return int(rng() % unsigned(n)); }
double now_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}
bool multi_process() { return getenv("CUDASIM_SESSION") != nullptr; }
std::string session_file(const std::string& name) {
  return std::string(getenv("CUDASIM_SESSION")) + "/" + name;
}
void count(Counter counter, uint64_t n) { counters[counter] += n; }

char* allocate(size_t size, size_t align) {
  if (allocations_until_failure == 0) return nullptr;
  if (allocations_until_failure > 0) --allocations_until_failure;
  char* const p = device_heap.take(size, align, device);
  if (!p) return nullptr;
  count(kAllocations);
  memset(p, 0xff, size);  // NaN until written
  return p;
}

void raise(cudaError_t code, const std::string& text) {
  if (fault.code != cudaSuccess) return;
  fault = {code, "cudasim: " + text};
  fprintf(stderr, "cudasim: rank %d: %s\n", int(settings.slot), text.c_str());
}

cudaError_t result(cudaError_t e) {
  if (e == cudaSuccess) e = fault.code;
  if (e != cudaSuccess) last_error = e;
  return e;
}

}  // namespace sim

using namespace sim;

API int cudasim_set(const char* name, const char* value) {
  Lock lock;
  const auto field = fields().find(name);
  if (field == fields().end()) return 1;
  if (field->first == "order") drain_all();  // what is queued belongs to the old order
  settings.*field->second = parse(value);
  if (field->first == "seed") seed_random();
  return 0;
}

API double cudasim_get(const char* name) {
  Lock lock;
  const auto field = fields().find(name);
  return field == fields().end() ? -1 : settings.*field->second;
}

API void cudasim_busy(cudaStream_t s, double us, const char* name) {
  Lock lock;
  Op op;
  op.name = name;
  op.fixed_us = us;
  push(stream_of(s), std::move(op));
}

// Charges work that was done by other means (operators on the CPU) to a stream's clock.
API void cudasim_charge(cudaStream_t s, double bytes, const char* name) {
  Lock lock;
  Op op;
  op.name = name;
  op.run = [=] { return bytes; };
  op.rate = rate(settings.mem_gbps);
  op.fixed_us = settings.launch_us;
  push(stream_of(s), std::move(op));
}

// Writes what was computed by other means, when its turn comes.
API void cudasim_write(cudaStream_t s, void* dst, const void* src, size_t size) {
  Lock lock;
  Op op;
  op.name = "write";
  op.traced = false;
  op.run = [=, data = std::string(static_cast<const char*>(src), size)] {
    copy(dst, data.data(), size);
    return 0.0;
  };
  push(stream_of(s), std::move(op));
}

API void cudasim_drain(cudaStream_t s) {
  Lock lock;
  drain(stream_of(s));
}
API void cudasim_drain_all() {
  Lock lock;
  drain_all();
}
API int cudasim_pending() {
  Lock lock;
  size_t n = 0;
  for (const Stream* s : streams) n += s->queue.size();
  return int(n);
}
API uint64_t cudasim_contexts() { return contexts; }
API double cudasim_host_us() {
  Lock lock;
  return host_us;
}
// 0 not allocated, 1 allocated, 2 written.
API void cudasim_mark(void* p, size_t size, int state) {
  Lock lock;
  if (on_device(p)) memset(state_of(p), state, size);
}
API int cudasim_is_marked(const void* p, size_t size, int state) {
  Lock lock;
  return on_device(p) &&
         std::all_of(state_of(p), state_of(p) + size, [state](uint8_t s) { return s == state; });
}
API const char* cudasim_fault() {
  Lock lock;
  return fault.text.c_str();
}
API void cudasim_fail_allocations_after(int64_t n) {
  Lock lock;
  allocations_until_failure = n;
}
API uint64_t cudasim_counter(int counter) {
  Lock lock;
  return counters[counter];
}
API uint64_t cudasim_peak_bytes() {
  Lock lock;
  return device_heap.peak;
}

// Forgets a fault; clocks, trace and counters start again at 0.
API void cudasim_reset() {
  Lock lock;
  drain_all();
  drop_everything();
  fault = Fault();
  last_error = cudaSuccess;
  reset_streams();
  contexts = 0;
  std::fill(std::begin(counters), std::end(counters), 0);
  allocations_until_failure = -1;
  device_heap.peak = device_heap.used;
  ptx::traffic.clear();
}

// The accesses of kernels to global memory since the last reset, as JSON.
API const char* cudasim_traffic() {
  Lock lock;
  static std::string& json = *new std::string;
  json = "[";
  for (const auto& [kind, t] : ptx::traffic) {
    char line[1024];
    snprintf(line, sizeof line,
             "%s{\"kernel\": \"%.600s\", \"op\": \"%s\", \"width\": %d, \"threads\": %llu, "
             "\"bytes\": %llu, \"requests\": %llu, \"sectors\": %llu}",
             json.size() > 1 ? ",\n" : "", kind.kernel.c_str(), kind.op.c_str(), kind.width,
             static_cast<unsigned long long>(t.threads), static_cast<unsigned long long>(t.bytes),
             static_cast<unsigned long long>(t.requests),
             static_cast<unsigned long long>(t.sectors));
    json += line;
  }
  json += "]";
  return json.c_str();
}
