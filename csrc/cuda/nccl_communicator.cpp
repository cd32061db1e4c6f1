#include "nccl_communicator.h"

#include <utility>

#include "../check.h"

namespace fsdpx::cuda {
namespace {

nccl::DataType data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return nccl::kFloat32;
    case DType::kFloat64:
      return nccl::kFloat64;
    case DType::kFloat16:
      return nccl::kFloat16;
    case DType::kBFloat16:
      return nccl::kBFloat16;
    default:
      check(false, "NCCL can't add ", name(dtype));
      return nccl::kInt8;
  }
}

}  // namespace

NcclCommunicator::NcclCommunicator(Surroundings surroundings, const nccl::UniqueId& id)
    : DeviceCommunicator("nccl", std::move(surroundings)) {
  const DeviceGuard guard(device());
  nccl_.check(nccl_.ncclCommInitRank(&gathers_, size(), id, rank()), "ncclCommInitRank");
  nccl_.check(nccl_.ncclCommSplit(gathers_, 0, rank(), &sums_, nullptr), "ncclCommSplit", gathers_);
}

NcclCommunicator::~NcclCommunicator() = default;  // see close(): at exit NCCL may be gone

void NcclCommunicator::begin_group() { nccl_.check(nccl_.ncclGroupStart(), "ncclGroupStart"); }

void NcclCommunicator::end_group() { nccl_.check(nccl_.ncclGroupEnd(), "ncclGroupEnd"); }

void NcclCommunicator::all_gather_in_place(void* data, int64_t nbytes) {
  const char* const own = static_cast<char*>(data) + rank() * nbytes;
  nccl_.check(nccl_.ncclAllGather(own, data, nbytes, nccl::kInt8, gathers_, stream()),
              "ncclAllGather", gathers_);
}

void NcclCommunicator::reduce_scatter_in_place(void* data, DType dtype, int64_t numel) {
  char* const own = static_cast<char*>(data) + rank() * numel * itemsize(dtype);
  nccl_.check(
      nccl_.ncclReduceScatter(data, own, numel, data_type(dtype), nccl::kSum, sums_, stream()),
      "ncclReduceScatter", sums_);
}

void NcclCommunicator::all_reduce_in_place(void* data, DType dtype, int64_t numel) {
  nccl_.check(nccl_.ncclAllReduce(data, data, numel, data_type(dtype), nccl::kSum, sums_, stream()),
              "ncclAllReduce", sums_);
}

std::string NcclCommunicator::problem() {
  std::lock_guard lock(mutex_);
  for (const nccl::Comm comm : {gathers_, sums_}) {
    nccl::Result error = nccl::kSuccess;
    if (comm == nullptr) continue;
    nccl_.ncclCommGetAsyncError(comm, &error);
    if (error != nccl::kSuccess && error != nccl::kInProgress)
      return detail::concat("NCCL reports on rank ", rank(), ": ", nccl_.ncclGetErrorString(error),
                            " (", nccl_.ncclGetLastError(comm), ")");
  }
  return {};
}

// Also how a communicator that has nothing to do ends: destroying would wait for the other ranks,
// which may be gone.
void NcclCommunicator::abort() {
  std::lock_guard lock(mutex_);
  for (nccl::Comm* comm : {&sums_, &gathers_})
    if (*comm != nullptr) nccl_.ncclCommAbort(std::exchange(*comm, nullptr));
}

void NcclCommunicator::destroy() { abort(); }

}  // namespace fsdpx::cuda
