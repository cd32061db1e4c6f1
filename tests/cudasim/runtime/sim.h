// Core of the simulated CUDA runtime: memory, streams, events, virtual clock, faults. The cudart_*
// and nccl_* files put NVIDIA's C interfaces on top of it. Objects that threads may use after
// main() has returned are never destroyed.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace sim {

// ---- Settings: environment variables CUDASIM_*, or cudasim_set

constexpr double kEager = 0, kLate = 1, kRandom = 2;  // orders
struct Settings {
  double order = kEager, seed = 1;
  double devices = 1, slot = 0, memory_mb = 512, arch = 90;
  double nvlink = 1;        // 0: devices are joined by PCIe
  double capturing = 0;     // not zero: streams say that a graph is being captured
  double nccl_windows = 1;  // 0: registering a window succeeds, but makes none
  double nccl_absent = 0;   // 1: this rank does not come where a communicator is made, 2: split
  double nccl_hangs = 0;    // not zero: NCCL's collectives do not return until they are aborted
  double timeout_s = 60;    // until an operation that waits for another rank is an error
  double idle_s = 0.2;      // until a process whose host makes no calls runs what is queued
  double stuck_s = 0.05;  // until a late process that waits for others runs what they may wait for
  // The cost model. Round numbers, not measurements.
  double mem_gbps = 4000, host_gbps = 50, link_gbps = 400;
  double launch_us = 2, link_us = 10, call_us = 0;
};
extern Settings settings;
inline double rate(double gbps) { return gbps * 1e3; }  // bytes per microsecond
int random_below(int n);
bool multi_process();
std::string session_file(const std::string& name);
double now_s();  // of the wall clock, for time limits only

// What the host did since the last cudasim_reset.
enum Counter {
  kAllocations,
  kFrees,
  kHostWaits,
  kLaunches,
  kCopies,
  kCollectives,
  kBlocks,
  kNumCounters
};
void count(Counter counter, uint64_t n = 1);

// ---- Memory. Every process of a session sees the arena of slot s at kBase + s * kStride, so that
// a device pointer means the same everywhere. The first half of an arena is device memory, the
// second is staging space of the runtime. Each byte has a state: 0 not allocated, 1 allocated, 2
// written.

constexpr int kSlots = 16;
inline char* const kBase = reinterpret_cast<char*>(0x200000000000);
constexpr size_t kStride = size_t(2) << 30;

struct Region {
  size_t size;
  int device;
};
// How often a region is mapped: by processes that opened its handle, and by NCCL windows. It lies
// at the end of the region's red zone, where all processes see it.
std::atomic<int>& mappings_of(char* p, const Region& region);
struct Heap {
  std::map<char*, size_t> holes;
  std::map<char*, Region> regions;
  size_t used = 0, peak = 0;
  char* take(size_t size, size_t align, int device);  // nullptr when full
  bool give(char* p);
  const std::pair<char* const, Region>* find(const void* p) const;
};
extern Heap &device_heap, &staging_heap;
char* allocate(size_t size, size_t align);  // device memory; nullptr when full or told to fail
char* reserve(size_t size);                 // zeros, of which only touched pages cost memory
uint8_t* state_of(const void* p);
bool on_device(const void* p);  // in the arena of any slot
bool is_pinned(const void* p, size_t size = 1);
int slot_of(const void* p);
void mark_written(void* p, size_t size);
void copy(void* dst, const void* src, size_t size);  // data and states
bool attach(int slot);                               // maps the arena of another process
void start_memory();

// ---- Streams. An operation runs when it is at the front of its stream and `ready`.

struct Stream;
struct Record {  // one cudaEventRecord
  Stream* stream;
  std::string after = "nothing";  // the operation before it on its stream
  bool done = false;
  double time = 0;
  int clock = 0;  // which one: each reset starts a new clock
};
using RecordPtr = std::shared_ptr<Record>;
struct Op {
  std::string name;
  std::function<double()> run;          // the effect; returns the bytes that the cost model counts
  double rate = 0, fixed_us = 0;        // cost = fixed_us + bytes / rate
  std::function<bool(Op&)> ready = {};  // may it end? (a collective announces itself in here)
  std::function<std::string()> waiting_for = {};  // set when others decide about `ready`
  RecordPtr wait = {}, record = {};    // event that it waits for, event that it completes
  double host_us = 0, not_before = 0;  // it starts at max(end of the previous one, these)
  bool traced = true;
};
struct Stream {
  std::deque<Op> queue;
  std::string latest = "nothing";      // operation pushed
  std::vector<size_t> new_waits = {};  // noted since then
  int id = 0, device = 0;
  double time = 0;
};
struct SharedEvent {  // an event that has a handle for other processes
  std::atomic<uint64_t> recorded, done;
  double time;
};
struct Event {
  RecordPtr latest;
  int device = 0;
  SharedEvent* shared = nullptr;
  bool remote = false;
};

extern std::vector<Stream*>& streams;
extern thread_local int device;
// What all but the simplest calls do: the thread's device gets a context, which on a GPU costs
// hundreds of megabytes there.
void enter_context();
extern std::atomic<uint64_t> contexts;  // a bit for each, since the last reset
extern double host_us;                  // the host's virtual clock
Stream* stream_of(cudaStream_t s);
Stream* new_stream(int device);
void push(Stream* s, Op op);
void drain(Stream* s);  // runs what is needed until s is empty; the clocks do not notice
void drain_all();
void sync(Stream* s);  // the same, and the host's clock waits too
void sync_all();
void drive(Stream* s, const std::function<bool()>& done);
// Waits for something that other processes do; false after the time limit.
bool wait_until(const std::function<bool()>& done);
void poll();  // a query: lets eager and random streams, and a host that spins, advance
bool step_first();
void drop_everything();
void reset_streams();
// One cudaStreamWaitEvent, by what it orders. True when it is to be left out (cudasim_drop_waits).
bool note_wait(Stream* s, const Record& event);

// ---- Faults are sticky, like a corrupted CUDA context, until cudasim_reset

struct Fault {
  cudaError_t code = cudaSuccess;
  std::string text;
};
extern Fault& fault;
void raise(cudaError_t code, const std::string& text);
cudaError_t result(cudaError_t e = cudaSuccess);  // of an API function: the fault, if there is one
extern thread_local cudaError_t last_error;

// Taken by every entry point, may be nested. Gives Python's GIL away while it waits.
struct Lock {
  Lock();
  ~Lock();
};
// Lets other threads use the runtime, and Python, for a while; for use within a Lock.
void pause_us(int us);
// This thread has put work on a stream, and how often it has since been told "not ready".
extern thread_local bool enqueues;
extern thread_local int spins;

}  // namespace sim
