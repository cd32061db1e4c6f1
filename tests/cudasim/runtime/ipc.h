// Handles for other processes. Arenas have the same address everywhere, so a handle is an address.
#pragma once
#include <unistd.h>

#include "sim.h"

namespace sim::ipc {

struct Content {
  uint64_t magic;
  int pid;
  void* p;
  std::atomic<int>* mappings;  // of memory
};
constexpr uint64_t kMemory = 0x6d656d73696d6373, kEvent = 0x76656d73696d6373;

template <typename Handle>
void fill(Handle* h, uint64_t magic, void* p, std::atomic<int>* mappings = nullptr) {
  memset(h, 0, sizeof *h);
  const Content content{magic, getpid(), p, mappings};
  memcpy(static_cast<void*>(h), &content, sizeof content);
}

template <typename Handle>
cudaError_t open(const Handle& h, uint64_t magic, void** p, Content* opened = nullptr) {
  Content content;
  memcpy(&content, &h, sizeof content);
  if (opened) *opened = content;
  // CUDA refuses the handles of the process itself, too.
  if (content.magic != magic || content.pid == getpid()) return cudaErrorInvalidResourceHandle;
  if (!attach(slot_of(content.p))) return cudaErrorMapBufferObjectFailed;
  *p = content.p;
  return cudaSuccess;
}

}  // namespace sim::ipc
