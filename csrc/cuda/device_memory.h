// Where the memory of a communicator on GPUs comes from, and how its ranks map each other's.
//
// `plain`: of cudaMalloc; peers map nothing.
//
// `ipc`: of cudaMalloc, in whole pieces of the driver's; peers map it by CUDA IPC handles.
//
// `window`: of ncclMemAlloc (nccl_memory.h); peers map it by NCCL windows, whose addresses NCCL
// tells. For the `nccl` communicator it is registered, and not mapped.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device_leases.h"
#include "device_surroundings.h"

namespace fsdpx::cuda {

// Memory of which every rank has as much.
struct Region {
  char* data = nullptr;
  int64_t nbytes = 0;
  std::shared_ptr<void> owner;  // of this rank's part
  // By rank, this rank's own included; empty where ranks map nothing. The others' are mapped for as
  // long as `mappings` lives.
  std::vector<char*> peers;
  std::shared_ptr<void> mappings;

  void unmap_peers() {
    peers.clear();
    mappings.reset();
  }
};

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // This rank's part of a region, not yet shared, its content undefined. Throws where there is no
  // more memory; the ranks then agree that it failed.
  virtual Region make(int64_t nbytes) = 0;
  // Once every rank has made its part: lets all map all. Throws on all ranks when one cannot.
  // Collective.
  virtual void share(Region& region) { (void)region; }
  virtual bool maps_peers() const { return true; }
  // When no part of another rank is mapped any more, and none will be.
  virtual void close() noexcept {}
  // Until all ranks have closed theirs, for at most `seconds`.
  virtual bool wait_for_peers(double seconds) noexcept {
    (void)seconds;
    return true;
  }
};

class PlainMemory final : public DeviceMemory {
 public:
  explicit PlainMemory(int device) : device_(device) {}
  Region make(int64_t nbytes) override;
  bool maps_peers() const override { return false; }

 private:
  const int device_;
};

// What sources have in common whose memory is mapped: parts are freed when all have unmapped them.
class MappedMemory : public DeviceMemory {
 public:
  explicit MappedMemory(const Surroundings& surroundings);
  void share(Region& region) final;
  void close() noexcept override { leases_->give_up_all(); }
  bool wait_for_peers(double seconds) noexcept final;

 protected:
  // The peers' parts and what ends their mapping here, or throws on all ranks. Collective.
  struct Mapped {
    std::vector<char*> peers;
    std::shared_ptr<void> mappings;
  };
  virtual Mapped map(const Region& region) = 0;

  const Surroundings surroundings_;

 private:
  const std::shared_ptr<Leases> leases_;
};

class IpcMemory final : public MappedMemory {
 public:
  using MappedMemory::MappedMemory;
  Region make(int64_t nbytes) override;

 protected:
  Mapped map(const Region& region) override;
};

// Memory that peers map comes in whole pieces of the driver's: no two regions are in one.
int64_t whole_pieces(int64_t nbytes);

// The region of `nbytes` at `data`, given back by `free`.
Region owned_region(void* data, int64_t nbytes, int device, void (*free)(void*));

// "ipc" or "window" for ranks that map each other's memory, or "plain". Collective; throws on all
// ranks when some rank cannot.
std::shared_ptr<DeviceMemory> make_memory(const std::string& source,
                                          const Surroundings& surroundings);

}  // namespace fsdpx::cuda
