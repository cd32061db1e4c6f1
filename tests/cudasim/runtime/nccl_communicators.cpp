// NCCL: communicators, memory and windows.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "nccl_room.h"

using namespace sim;
using namespace sim::nccl;

std::string& sim::nccl::last_text = *new std::string("no error");

ncclResult_t sim::nccl::fail(ncclResult_t code, const std::string& text) {
  last_text = "cudasim: " + text;
  fprintf(stderr, "cudasim: rank %d: %s\n", int(settings.slot), text.c_str());
  return code;
}

std::string sim::nccl::missing(int n, const std::function<bool(int)>& here) {
  std::string text;
  for (int r = 0; r < n; ++r) {
    if (!here(r)) text += (text.empty() ? "" : ", ") + std::to_string(r);
  }
  return text;
}

ncclResult_t sim::nccl::when_all(ncclComm* c, int n, const std::string& what,
                                 const std::function<bool(int)>& here,
                                 const std::function<ncclResult_t()>& finish) {
  const auto all_here = [=] { return !multi_process() || missing(n, here).empty(); };
  if (!c->blocking) {
    c->pending = [=] { return all_here() ? finish() : ncclInProgress; };
    return c->state = ncclInProgress;
  }
  if (wait_until(all_here)) return finish();
  return fail(ncclSystemError, what + ": ranks " + missing(n, here) + " never came");
}

namespace {

Room* open_room(const std::string& id) {
  static auto& rooms = *new std::map<std::string, Room*>;
  Room*& room = rooms[id];
  if (room) return room;
  int fd = -1;
  if (multi_process()) {
    fd = open(session_file(id).c_str(), O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Room))) return nullptr;
  }
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const p = mmap(nullptr, sizeof(Room), PROT_READ | PROT_WRITE, flags, fd, 0);
  if (fd >= 0) close(fd);
  return room = p == MAP_FAILED ? nullptr : static_cast<Room*>(p);
}

ncclResult_t resolve(ncclComm* c) {
  if (!c->parent) return ncclSuccess;
  const SplitPost* posts = c->parent->room->splits[c->split_number];
  std::vector<std::pair<int, int>> members;  // (key, rank in the parent)
  for (int r = 0; r < c->parent->n; ++r) {
    if (!posts[r].posted) {
      return fail(ncclInvalidUsage,
                  "ncclCommSplit: rank " + std::to_string(r) + " has not called it yet");
    }
    if (posts[r].color == c->color) members.push_back({posts[r].key, r});
  }
  std::sort(members.begin(), members.end());
  const auto me = std::find(members.begin(), members.end(), std::pair(c->key, c->parent->rank));
  c->n = int(members.size());
  c->rank = int(me - members.begin());
  c->id = c->parent->id + "." + std::to_string(c->split_number) + "." + std::to_string(c->color);
  c->parent = nullptr;
  return enter(c);
}

}  // namespace

ncclResult_t sim::nccl::enter(ncclComm* c) {
  c->room = open_room(c->id);
  if (!c->room) return fail(ncclSystemError, "cannot open the room of communicator " + c->id);
  if (settings.nccl_absent != 1) c->room->joined[c->rank] = int(settings.slot) + 1;
  const auto here = [c](int r) { return c->room->joined[r] != 0; };
  return when_all(c, c->n, "communicator " + c->id, here, [c] {
    for (int r = 0; multi_process() && r < c->n; ++r) {
      if (!attach(c->room->joined[r] - 1)) {
        return fail(ncclSystemError, "cannot map the memory of rank " + std::to_string(r));
      }
    }
    return ncclSuccess;
  });
}

ncclResult_t sim::nccl::check(ncclComm* c) {
  if (!c) return fail(ncclInvalidArgument, "null communicator");
  if (c->destroyed) return fail(ncclInvalidUsage, "communicator " + c->id + " was destroyed");
  if (c->aborted) return fail(ncclInvalidUsage, "communicator " + c->id + " was aborted");
  if (c->state == ncclInProgress) return fail(ncclInvalidUsage, "a call is in progress");
  return resolve(c);
}

// CUDASIM_NCCL_VERSION pretends to be another release.
API ncclResult_t ncclGetVersion(int* v) {
  const char* const text = getenv("CUDASIM_NCCL_VERSION");
  *v = text ? atoi(text) : NCCL_VERSION_CODE;
  return ncclSuccess;
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Lock lock;
  static int number = 0;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "comm-%d-%d", getpid(), number++);
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int n, ncclUniqueId id, int rank,
                                        ncclConfig_t* config) {
  Lock lock;
  if (n < 1 || n > kRanks || rank < 0 || rank >= n) {
    return fail(ncclInvalidArgument, "ncclCommInitRank: bad rank or number of ranks");
  }
  *comm = new ncclComm{id.internal, n, rank, device};
  (*comm)->blocking = !config || config->blocking != 0;
  return enter(*comm);
}
API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int n, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, n, id, rank, nullptr);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int, ncclUniqueId* ids,
                                          ncclConfig_t* config) {
  return ncclCommInitRankConfig(c, n, ids[0], rank, config);
}
API ncclResult_t ncclCommInitAll(ncclComm_t* comms, int n, const int* devices) {
  Lock lock;
  if (multi_process()) return fail(ncclInvalidUsage, "ncclCommInitAll needs one process");
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  const int before = device;
  for (int r = 0; r < n; ++r) {
    device = devices ? devices[r] : r;
    ncclCommInitRank(&comms[r], n, id, r);
  }
  device = before;
  return ncclSuccess;
}
API ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm,
                               ncclConfig_t* config) {
  Lock lock;
  CHECK_COMM(parent);
  *comm = nullptr;
  if (parent->splits == kSplits) return fail(ncclInternalError, "too many splits");
  const int number = parent->splits++;
  SplitPost* const posts = parent->room->splits[number];
  posts[parent->rank].color = color;
  posts[parent->rank].key = key;
  if (settings.nccl_absent != 2) posts[parent->rank].posted = 1;
  const bool blocking = config && config->blocking != NCCL_CONFIG_UNDEF_INT ? config->blocking != 0
                                                                            : parent->blocking;
  const auto here = [posts](int r) { return posts[r].posted != 0; };
  return when_all(parent, parent->n, "ncclCommSplit", here, [=] {
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    ncclComm* const c = *comm = new ncclComm{"", 0, 0, parent->dev};
    c->blocking = blocking;
    c->parent = parent;
    c->split_number = number;
    c->color = color;
    c->key = key;
    return multi_process() ? resolve(c) : ncclSuccess;
  });
}
API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
// Communicators are never freed: work that is still queued may refer to them.
API ncclResult_t ncclCommDestroy(ncclComm_t c) {
  Lock lock;
  if (c->destroyed) return fail(ncclInvalidUsage, "communicator " + c->id + " is destroyed twice");
  c->destroyed = true;
  return ncclSuccess;
}
// Pending operations end without effect, and windows go.
API ncclResult_t ncclCommAbort(ncclComm_t c) {
  Lock lock;
  if (!c) return ncclSuccess;
  c->aborted = true;
  for (const auto& [number, mappings] : c->open_windows) --*mappings;
  for (const auto& [data, mappings] : c->registered) --*mappings;
  c->open_windows.clear();
  c->registered.clear();
  return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* e) {
  Lock lock;
  if (c->pending) {
    c->state = c->pending();
    if (c->state != ncclInProgress) c->pending = {};
  }
  *e = c->room && c->room->failed ? ncclResult_t(c->room->failed.load()) : c->state;
  if (fault.code == cudaErrorLaunchTimeout && c->finished < c->issued) *e = ncclTimeout;
  return ncclSuccess;
}
API ncclResult_t ncclCommCount(const ncclComm_t c, int* n) {
  Lock lock;
  CHECK_COMM(c);
  *n = c->n;
  return ncclSuccess;
}
API ncclResult_t ncclCommUserRank(const ncclComm_t c, int* r) {
  Lock lock;
  CHECK_COMM(c);
  *r = c->rank;
  return ncclSuccess;
}
API ncclResult_t ncclCommCuDevice(const ncclComm_t c, int* d) {
  *d = c->dev;
  return ncclSuccess;
}
// Counts as a window, but for this rank alone.
API ncclResult_t ncclCommRegister(const ncclComm_t c, void* p, size_t, void** h) {
  Lock lock;
  CHECK_COMM(c);
  const auto* region = device_heap.find(p);
  if (!region) return fail(ncclInvalidArgument, "ncclCommRegister: not memory of this process");
  ++*(c->registered[p] = &mappings_of(region->first, region->second));
  *h = p;
  return ncclSuccess;
}
API ncclResult_t ncclCommDeregister(const ncclComm_t c, void* h) {
  Lock lock;
  CHECK_COMM(c);
  const auto registered = c->registered.find(h);
  if (registered == c->registered.end()) {
    return fail(ncclInvalidArgument, "ncclCommDeregister: not registered");
  }
  --*registered->second;
  c->registered.erase(registered);
  return ncclSuccess;
}
API const char* ncclGetLastError(ncclComm_t) { return last_text.c_str(); }
API const char* ncclGetErrorString(ncclResult_t r) {
  static const char* const names[] = {"no error",       "unhandled cuda error", "system error",
                                      "internal error", "invalid argument",     "invalid usage",
                                      "remote error",   "in progress",          "timeout"};
  return r >= 0 && r < 9 ? names[r] : "unknown result code";
}

// ---- Memory and windows

API ncclResult_t ncclMemAlloc(void** p, size_t size) {
  Lock lock;
  *p = allocate(size, NCCL_WIN_REQUIRED_ALIGNMENT);
  return *p ? ncclSuccess : fail(ncclUnhandledCudaError, "ncclMemAlloc: out of memory");
}
API ncclResult_t ncclMemFree(void* p) {
  return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

API ncclResult_t ncclCommWindowRegister(ncclComm_t c, void* p, size_t size, ncclWindow_t* win,
                                        int flags) {
  Lock lock;
  CHECK_COMM(c);
  *win = nullptr;
  const auto* region = device_heap.find(p);
  if (!region) {
    return fail(ncclInvalidArgument, "ncclCommWindowRegister: not device memory of this process");
  }
  if ((flags & NCCL_WIN_COLL_SYMMETRIC) &&
      reinterpret_cast<uintptr_t>(p) % NCCL_WIN_REQUIRED_ALIGNMENT) {
    return fail(ncclInvalidArgument, "ncclCommWindowRegister: buffer not aligned");
  }
  const int number = c->windows++;
  WindowPost* const posts = c->room->windows[number % kWindows];
  if (c->open_windows.contains(number - kWindows)) {
    return fail(ncclInternalError, "too many windows at a time");
  }
  std::atomic<int>* const mappings = &mappings_of(region->first, region->second);
  posts[c->rank].base = static_cast<char*>(p);
  posts[c->rank].size = size;
  posts[c->rank].number = number + 1;
  const auto here = [=](int r) { return posts[r].number == number + 1; };
  return when_all(c, c->n, "ncclCommWindowRegister", here, [=] {
    if (!settings.nccl_windows) return ncclSuccess;  // as where memory is not symmetric
    ++*(c->open_windows[number] = mappings);
    *win = new ncclWindow_vidmem{c, number, static_cast<char*>(p)};
    return ncclSuccess;
  });
}
// Other ranks' windows stay.
API ncclResult_t ncclCommWindowDeregister(ncclComm_t c, ncclWindow_t w) {
  Lock lock;
  CHECK_COMM(c);
  --*c->open_windows.at(w->number);
  c->open_windows.erase(w->number);
  delete w;
  return ncclSuccess;
}
API ncclResult_t ncclWinGetUserPtr(ncclComm_t, ncclWindow_t w, void** p) {
  *p = w->base;
  return ncclSuccess;
}
API ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t w, size_t offset, int peer, void** p) {
  Lock lock;
  if (peer < 0 || peer >= w->comm->n) return fail(ncclInvalidArgument, "no such peer");
  const WindowPost& post = w->comm->room->windows[w->number % kWindows][peer];
  if (post.number != w->number + 1) {
    return fail(ncclInvalidUsage,
                "rank " + std::to_string(peer) + " has not registered its window");
  }
  if (offset > post.size) return fail(ncclInvalidArgument, "offset beyond the window");
  *p = post.base + offset;
  return ncclSuccess;
}
// One domain holds all ranks.
API ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t w, size_t offset, int rank, void** p) {
  return ncclGetPeerDevicePointer(w, offset, rank, p);
}
API ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t, size_t, void** p) {
  *p = nullptr;
  return fail(ncclInvalidUsage, "multicast is not simulated");
}
