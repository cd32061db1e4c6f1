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

ncclResult_t sim::nccl::wait_for_all(int n, const std::string& what,
                                     const std::function<bool(int)>& here) {
  if (!multi_process() || wait_until([&] { return missing(n, here).empty(); })) return ncclSuccess;
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
  c->room->joined[c->rank] = int(settings.slot) + 1;
  if (!multi_process()) return ncclSuccess;
  const ncclResult_t came =
      wait_for_all(c->n, "communicator " + c->id, [&](int r) { return c->room->joined[r] != 0; });
  if (came != ncclSuccess) return came;
  for (int r = 0; r < c->n; ++r) {
    if (!attach(c->room->joined[r] - 1)) {
      return fail(ncclSystemError, "cannot map the memory of rank " + std::to_string(r));
    }
  }
  return ncclSuccess;
}

ncclResult_t sim::nccl::check(ncclComm* c) {
  if (!c) return fail(ncclInvalidArgument, "null communicator");
  if (c->destroyed) return fail(ncclInvalidUsage, "communicator " + c->id + " was destroyed");
  if (c->aborted) return fail(ncclInvalidUsage, "communicator " + c->id + " was aborted");
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
API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int n, ncclUniqueId id, int rank) {
  Lock lock;
  if (n < 1 || n > kRanks || rank < 0 || rank >= n) {
    return fail(ncclInvalidArgument, "ncclCommInitRank: bad rank or number of ranks");
  }
  return enter(*comm = new ncclComm{id.internal, n, rank, device});
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int rank,
                                        ncclConfig_t*) {
  return ncclCommInitRank(c, n, id, rank);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int, ncclUniqueId* ids,
                                          ncclConfig_t*) {
  return ncclCommInitRank(c, n, ids[0], rank);
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
                               ncclConfig_t*) {
  Lock lock;
  CHECK_COMM(parent);
  *comm = nullptr;
  if (parent->splits == kSplits) return fail(ncclInternalError, "too many splits");
  const int number = parent->splits++;
  SplitPost* const posts = parent->room->splits[number];
  posts[parent->rank].color = color;
  posts[parent->rank].key = key;
  posts[parent->rank].posted = 1;
  const ncclResult_t came =
      wait_for_all(parent->n, "ncclCommSplit", [&](int r) { return posts[r].posted != 0; });
  if (came != ncclSuccess || color == NCCL_SPLIT_NOCOLOR) return came;
  ncclComm* const c = *comm = new ncclComm{"", 0, 0, parent->dev};
  c->parent = parent;
  c->split_number = number;
  c->color = color;
  c->key = key;
  return multi_process() ? resolve(c) : ncclSuccess;
}
API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
// Communicators are never freed: work that is still queued may refer to them.
API ncclResult_t ncclCommDestroy(ncclComm_t c) {
  Lock lock;
  if (c->destroyed) return fail(ncclInvalidUsage, "communicator " + c->id + " is destroyed twice");
  c->destroyed = true;
  return ncclSuccess;
}
// Pending operations end without effect.
API ncclResult_t ncclCommAbort(ncclComm_t c) {
  Lock lock;
  if (c) c->aborted = true;
  return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* e) {
  Lock lock;
  *e = c->room ? ncclResult_t(c->room->failed.load()) : ncclSuccess;
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
API ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** h) {
  *h = nullptr;
  return ncclSuccess;
}
API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
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
  if (!device_heap.find(p)) {
    return fail(ncclInvalidArgument, "ncclCommWindowRegister: not device memory of this process");
  }
  if ((flags & NCCL_WIN_COLL_SYMMETRIC) &&
      reinterpret_cast<uintptr_t>(p) % NCCL_WIN_REQUIRED_ALIGNMENT) {
    return fail(ncclInvalidArgument, "ncclCommWindowRegister: buffer not aligned");
  }
  if (c->windows == kWindows) return fail(ncclInternalError, "too many windows");
  const int number = c->windows++;
  WindowPost* const posts = c->room->windows[number];
  posts[c->rank].base = static_cast<char*>(p);
  posts[c->rank].size = size;
  posts[c->rank].posted = 1;
  *win = new ncclWindow_vidmem{c, number, static_cast<char*>(p)};
  return wait_for_all(c->n, "ncclCommWindowRegister", [&](int r) { return posts[r].posted != 0; });
}
API ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }
API ncclResult_t ncclWinGetUserPtr(ncclComm_t, ncclWindow_t w, void** p) {
  *p = w->base;
  return ncclSuccess;
}
API ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t w, size_t offset, int peer, void** p) {
  Lock lock;
  if (peer < 0 || peer >= w->comm->n) return fail(ncclInvalidArgument, "no such peer");
  const WindowPost& post = w->comm->room->windows[w->number][peer];
  if (!post.posted) {
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
