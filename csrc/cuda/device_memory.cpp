#include "device_memory.h"

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "../check.h"
#include "nccl_memory.h"

namespace fsdpx::cuda {
namespace {

constexpr int64_t kPiece = int64_t{2} << 20;
constexpr double kPatience = 1.0;  // seconds, for memory that others are about to unmap

Region allocate(int64_t nbytes, int device) {
  const DeviceGuard guard(device);
  void* data = nullptr;
  free_parked();
  cudaError_t error = cudaMalloc(&data, nbytes);
  if (error != cudaSuccess && wait_for_parked(kPatience)) {
    cudaGetLastError();
    error = cudaMalloc(&data, nbytes);
  }
  check_cuda(error, "cudaMalloc");
  return owned_region(data, nbytes, device, [](void* p) { cudaFree(p); });
}

// The other ranks' parts of a region, for as long as they are mapped.
class IpcMappings {
 public:
  explicit IpcMappings(int device) : device_(device) {}
  ~IpcMappings() {
    try {
      const DeviceGuard guard(device_);
      for (void* mapped : mapped_) cudaIpcCloseMemHandle(mapped);
    } catch (const std::exception&) {
      // the process ends, and CUDA is gone
    }
  }
  IpcMappings(const IpcMappings&) = delete;
  IpcMappings& operator=(const IpcMappings&) = delete;

  char* map(const cudaIpcMemHandle_t& handle) {
    void* data = nullptr;
    check_cuda(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess),
               "cudaIpcOpenMemHandle");
    mapped_.push_back(data);
    return static_cast<char*>(data);
  }

 private:
  const int device_;
  std::vector<void*> mapped_;
};

}  // namespace

int64_t whole_pieces(int64_t nbytes) { return (nbytes + kPiece - 1) / kPiece * kPiece; }

Region owned_region(void* data, int64_t nbytes, int device, void (*free)(void*)) {
  Region region;
  region.data = static_cast<char*>(data);
  region.nbytes = nbytes;
  region.owner = {data, [device, free](void* p) {
                    try {
                      const DeviceGuard guard(device);
                      free(p);
                    } catch (const std::exception&) {
                      // the process ends, and CUDA is gone
                    }
                  }};
  return region;
}

Region PlainMemory::make(int64_t nbytes) { return allocate(nbytes, device_); }

// ---- Mapped by peers

MappedMemory::MappedMemory(const Surroundings& surroundings)
    : surroundings_(surroundings), leases_(std::make_shared<Leases>(surroundings)) {}

void MappedMemory::share(Region& region) {
  const DeviceGuard guard(surroundings_.device());
  const int64_t number = leases_->next();
  // From here on a peer may have it mapped, also when the following throws.
  region.owner = {region.data,
                  [memory = std::move(region.owner), leases = leases_, number](void*) mutable {
                    park(std::move(memory), std::move(leases), number);
                  }};
  const auto given_up = [leases = leases_, number](void*) { leases->give_up(number); };
  std::shared_ptr<void> lease(leases_.get(), given_up);
  Mapped mapped = map(region);
  region.peers = std::move(mapped.peers);
  region.mappings = {mapped.mappings.get(),
                     [held = std::move(mapped.mappings), lease = std::move(lease)](void*) mutable {
                       held.reset();  // first unmap, then say so
                       lease.reset();
                     }};
}

bool MappedMemory::wait_for_peers(double seconds) noexcept {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  while (!leases_->all_given_up()) {
    if (std::chrono::duration<double>(Clock::now() - begin).count() > seconds) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  free_parked();
  return true;
}

Region IpcMemory::make(int64_t nbytes) {
  Region region = allocate(whole_pieces(nbytes), surroundings_.device());
  region.nbytes = nbytes;  // what was asked for
  return region;
}

IpcMemory::Mapped IpcMemory::map(const Region& region) {
  cudaIpcMemHandle_t mine = {};
  check_all(surroundings_, detail::problem_of([&] {
              check_cuda(cudaIpcGetMemHandle(&mine, region.data), "cudaIpcGetMemHandle");
            }),
            "share GPU memory");
  const std::vector<char> all = exchange(surroundings_, &mine, sizeof(mine));
  const auto mappings = std::make_shared<IpcMappings>(surroundings_.device());
  std::vector<char*> peers(surroundings_.size(), region.data);
  check_all(surroundings_, detail::problem_of([&] {
              for (int peer = 0; peer < surroundings_.size(); ++peer) {
                if (peer == surroundings_.rank()) continue;
                cudaIpcMemHandle_t theirs;
                std::memcpy(&theirs, &all[peer * sizeof(theirs)], sizeof(theirs));
                peers[peer] = mappings->map(theirs);
              }
            }),
            "share GPU memory");
  return {std::move(peers), mappings};
}

std::shared_ptr<DeviceMemory> make_memory(const std::string& source,
                                          const Surroundings& surroundings) {
  if (source == "plain") return std::make_shared<PlainMemory>(surroundings.device());
  if (source == "ipc") return std::make_shared<IpcMemory>(surroundings);
  check(source == "window", "'", source,
        "' is no source of GPU memory; use 'plain', 'ipc' or 'window'");
  return std::make_shared<WindowMemory>(surroundings);
}

}  // namespace fsdpx::cuda
