#include "nccl_memory.h"

#include <string>
#include <utility>

#include "../check.h"

namespace fsdpx::cuda {
namespace {

constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
constexpr double kPatience = 1.0;

Region allocate(int64_t nbytes, int device) {
  const DeviceGuard guard(device);
  const nccl::Library& library = nccl::library();
  const auto size = static_cast<size_t>(whole_pieces(nbytes));
  void* data = nullptr;
  free_parked();
  nccl::Result result = library.ncclMemAlloc(&data, size);
  if (result != nccl::kSuccess && wait_for_parked(kPatience))
    result = library.ncclMemAlloc(&data, size);
  library.check(result, "ncclMemAlloc");
  return owned_region(data, nbytes, device, [](void* p) { nccl::library().ncclMemFree(p); });
}

void check_library() {
  const nccl::Library& library = nccl::library();
  check<std::runtime_error>(library.has_windows(), "NCCL ", library.version_text(),
                            " tells no addresses of windows: 2.29 or newer is needed");
}

// By rank, this one's at `own`. Registering succeeds without a window where memory is not
// symmetric.
std::vector<char*> addresses_in(nccl::Window window, const Surroundings& surroundings, char* own) {
  check<std::runtime_error>(window != nullptr, "NCCL makes no window: memory is not symmetric");
  std::vector<char*> addresses;
  for (int rank = 0; rank < surroundings.size(); ++rank) {
    void* data = own;
    if (rank != surroundings.rank())
      nccl::library().check(nccl::library().ncclGetPeerDevicePointer(window, 0, rank, &data),
                            "ncclGetPeerDevicePointer");
    check<std::runtime_error>(data != nullptr, "NCCL does not reach the memory of rank ", rank);
    addresses.push_back(static_cast<char*>(data));
  }
  return addresses;
}

}  // namespace

WindowMemory::WindowMemory(const Surroundings& surroundings) : MappedMemory(surroundings) {
  check_all(surroundings, detail::problem_of(check_library), "use NCCL windows");
  connection_ = std::make_shared<nccl::Connection>(surroundings);
}

Region WindowMemory::make(int64_t nbytes) { return allocate(nbytes, surroundings_.device()); }

WindowMemory::Mapped WindowMemory::map(const Region& region) {
  nccl::Window window = nullptr;
  connection_->on_root("ncclCommWindowRegister", [&](nccl::Comm root) {
    return nccl::library().ncclCommWindowRegister(
        root, region.data, static_cast<size_t>(whole_pieces(region.nbytes)), &window, kSymmetric);
  });
  const auto deregister = [connection = connection_, device = surroundings_.device()](void* made) {
    if (made == nullptr) return;
    connection->alone([&](nccl::Comm root) {
      const DeviceGuard guard(device);
      nccl::library().ncclCommWindowDeregister(root, static_cast<nccl::Window>(made));
    });
  };
  const std::shared_ptr<void> mappings(static_cast<void*>(window), deregister);
  std::vector<char*> peers;
  check_all(surroundings_,
            detail::problem_of([&] { peers = addresses_in(window, surroundings_, region.data); }),
            "use NCCL windows");
  return {std::move(peers), mappings};
}

void WindowMemory::close() noexcept {
  connection_->abort();
  MappedMemory::close();
}

// ---- Registered

RegisteredMemory::RegisteredMemory(int device, std::shared_ptr<nccl::Connection> connection,
                                   std::vector<nccl::Comm> comms)
    : device_(device), connection_(std::move(connection)), comms_(std::move(comms)) {}

Region RegisteredMemory::make(int64_t nbytes) {
  const nccl::Library& library = nccl::library();
  Region region = allocate(nbytes, device_);
  std::vector<std::shared_ptr<void>> handles;
  for (const nccl::Comm comm : comms_) {
    const nccl::Connection::Calls calls(*connection_);
    void* made = nullptr;
    library.check(library.ncclCommRegister(comm, region.data,
                                           static_cast<size_t>(whole_pieces(nbytes)), &made),
                  "ncclCommRegister", comm);
    handles.emplace_back(made, [connection = connection_, comm](void* handle) {
      connection->alone([&](nccl::Comm) { nccl::library().ncclCommDeregister(comm, handle); });
    });
  }
  region.owner = {region.data,
                  [memory = std::move(region.owner), handles = std::move(handles)](void*) mutable {
                    handles.clear();  // before the memory goes
                    memory.reset();
                  }};
  return region;
}

}  // namespace fsdpx::cuda
