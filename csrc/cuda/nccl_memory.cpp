#include "nccl_memory.h"

#include <string>
#include <utility>

#include "../check.h"

namespace fsdpx::cuda {
namespace {

constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
constexpr double kPatience = 1.0;

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

Region WindowMemory::make(int64_t nbytes) {
  const DeviceGuard guard(surroundings_.device());
  const nccl::Library& library = nccl::library();
  void* data = nullptr;
  free_parked();
  nccl::Result result = library.ncclMemAlloc(&data, whole_pieces(nbytes));
  if (result != nccl::kSuccess && wait_for_parked(kPatience))
    result = library.ncclMemAlloc(&data, whole_pieces(nbytes));
  library.check(result, "ncclMemAlloc");
  return owned_region(data, nbytes, surroundings_.device(),
                      [](void* p) { nccl::library().ncclMemFree(p); });
}

WindowMemory::Mapped WindowMemory::map(const Region& region) {
  nccl::Window window = nullptr;
  connection_->on_root("ncclCommWindowRegister", [&](nccl::Comm root) {
    return nccl::library().ncclCommWindowRegister(
        root, region.data, static_cast<size_t>(whole_pieces(region.nbytes)), &window, kSymmetric);
  });
  const auto deregister = [connection = connection_, device = surroundings_.device()](void* made) {
    if (made == nullptr) return;
    connection->on_root_alone([&](nccl::Comm root) {
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

}  // namespace fsdpx::cuda
