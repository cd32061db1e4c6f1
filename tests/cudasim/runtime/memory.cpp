// Arenas that all processes of a session share, and the heaps in them.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "sim.h"

namespace sim {

Heap &device_heap = *new Heap, &staging_heap = *new Heap;

namespace {

uint8_t* states = nullptr;  // of the byte kBase + i at states[i]
bool attached[kSlots] = {};
constexpr size_t kRedZone = 512;

[[noreturn]] void die(const char* what) {
  fprintf(stderr, "cudasim: %s: %s\n", what, strerror(errno));
  abort();
}

// nullptr when there is something else at this address.
char* map_at(void* at, size_t size, int fd, int flags) {
  flags |= MAP_NORESERVE | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  void* const p = mmap(at, size, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (p == MAP_FAILED && errno == EEXIST) return nullptr;
  if (p == MAP_FAILED || (at && p != at)) die("cannot map memory");
  return static_cast<char*>(p);
}

bool map_slot(int slot, int data_fd, int state_fd) {
  const size_t offset = static_cast<size_t>(slot) * kStride;
  if (!map_at(kBase + offset, kStride, data_fd, MAP_FIXED_NOREPLACE)) return false;
  map_at(states + offset, kStride, state_fd, MAP_FIXED);
  return attached[slot] = true;
}

int memory_file(const char* name) {
  const int fd = memfd_create(name, 0);
  if (fd < 0 || ftruncate(fd, kStride)) die("memfd_create");
  return fd;
}

// Other processes of the session find the arena through this file.
void publish_slot(int data_fd, int state_fd) {
  if (!multi_process()) return;
  const std::string path = session_file("slot." + std::to_string(int(settings.slot)));
  const std::string part = path + ".new";
  FILE* const file = fopen(part.c_str(), "w");
  if (!file) die(path.c_str());
  fprintf(file, "%d %d %d\n", getpid(), data_fd, state_fd);
  fclose(file);
  if (rename(part.c_str(), path.c_str())) die(path.c_str());
}

}  // namespace

char* reserve(size_t size) { return map_at(nullptr, size, -1, 0); }

void start_memory() {
  states = reinterpret_cast<uint8_t*>(reserve(kSlots * kStride));
  const int data_fd = memory_file("cudasim-data"), state_fd = memory_file("cudasim-state");
  // A process may hold two runtimes, each in a library of its own; the second takes another slot.
  while (!map_slot(int(settings.slot), data_fd, state_fd)) {
    if (multi_process() || ++settings.slot == kSlots) die("the memory of this rank is taken");
  }
  const int slot = int(settings.slot);
  publish_slot(data_fd, state_fd);
  char* const base = kBase + static_cast<size_t>(slot) * kStride;
  const size_t device_bytes = std::min(size_t(settings.memory_mb) << 20, kStride / 2);
  device_heap.holes[base + 4096] = device_bytes - 4096;
  staging_heap.holes[base + kStride / 2] = kStride / 2;
}

std::atomic<int>& mappings_of(char* p, const Region& region) {
  return *reinterpret_cast<std::atomic<int>*>(p + region.size - sizeof(std::atomic<int>));
}

char* Heap::take(size_t size, size_t align, int owner) {
  const size_t need = ((size + 511) & ~size_t(511)) + kRedZone;
  for (auto& [hole, room] : holes) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(hole);
    char* const p = reinterpret_cast<char*>((first + align - 1) & ~(align - 1));
    const size_t skip = static_cast<size_t>(p - hole);
    if (room < skip + need) continue;
    const size_t rest = room - skip - need;
    char* const at = hole;
    if (skip) {
      holes[at] = skip;
    } else {
      holes.erase(at);  // `room` and `hole` are dangling from here on
    }
    if (rest) holes[p + need] = rest;
    regions[p] = {need, owner};
    used += need;
    peak = std::max(peak, used);
    memset(state_of(p), 1, size);
    new (&mappings_of(p, regions[p])) std::atomic<int>(0);
    return p;
  }
  return nullptr;
}

bool Heap::give(char* p) {
  const auto region = regions.find(p);
  if (region == regions.end()) return false;
  memset(state_of(p), 0, region->second.size);
  used -= region->second.size;
  const auto hole = holes.emplace(p, region->second.size).first;
  regions.erase(region);
  const auto next = std::next(hole);
  if (next != holes.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    holes.erase(next);
  }
  if (hole != holes.begin()) {
    const auto before = std::prev(hole);
    if (before->first + before->second == hole->first) {
      before->second += hole->second;
      holes.erase(hole);
    }
  }
  return true;
}

const std::pair<char* const, Region>* Heap::find(const void* p) const {
  auto region = regions.upper_bound(const_cast<char*>(static_cast<const char*>(p)));
  if (region == regions.begin()) return nullptr;
  --region;
  return static_cast<const char*>(p) < region->first + region->second.size ? &*region : nullptr;
}

int slot_of(const void* p) {
  const char* const c = static_cast<const char*>(p);
  const bool inside = c >= kBase && c < kBase + kSlots * kStride;
  return inside ? int(static_cast<size_t>(c - kBase) / kStride) : -1;
}
bool on_device(const void* p) { return slot_of(p) >= 0; }
uint8_t* state_of(const void* p) { return states + (static_cast<const char*>(p) - kBase); }
void mark_written(void* p, size_t size) {
  if (on_device(p)) memset(state_of(p), 2, size);
}

void copy(void* dst, const void* src, size_t size) {
  memmove(dst, src, size);
  if (!on_device(dst)) return;
  if (on_device(src)) {
    memmove(state_of(dst), state_of(src), size);
  } else {
    mark_written(dst, size);
  }
}

bool attach(int slot) {
  if (slot < 0 || slot >= kSlots) return false;
  if (attached[slot]) return true;
  if (!multi_process()) return false;
  const std::string path = session_file("slot." + std::to_string(slot));
  FILE* file = nullptr;
  for (const double limit = now_s() + settings.timeout_s; !file && now_s() < limit; usleep(200)) {
    file = fopen(path.c_str(), "r");
  }
  if (!file) return false;
  int pid, fds[2], mine[2];
  const bool read = fscanf(file, "%d %d %d", &pid, &fds[0], &fds[1]) == 3;
  fclose(file);
  for (int i = 0; read && i < 2; ++i) {
    const std::string fd = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fds[i]);
    mine[i] = open(fd.c_str(), O_RDWR);
  }
  if (!read || mine[0] < 0 || mine[1] < 0) return false;
  return map_slot(slot, mine[0], mine[1]);
}

}  // namespace sim
