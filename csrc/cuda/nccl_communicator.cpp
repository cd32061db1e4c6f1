#include "nccl_communicator.h"

#include <utility>

#include "../check.h"
#include "kernels.h"

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

void NcclCommunicator::gather(const GatherOp& op, const Region& region) {
  cast_own(op, region);
  nccl_.check(nccl_.ncclGroupStart(), "ncclGroupStart");
  for (const GatherSegment& s : op.segments) {
    const int64_t nbytes = s.numel * itemsize(s.dst_dtype);
    char* const all = region.data + op.place.offset + s.dst_offset;
    nccl_.check(
        nccl_.ncclAllGather(all + rank() * nbytes, all, nbytes, nccl::kInt8, gathers_, stream()),
        "ncclAllGather", gathers_);
  }
  nccl_.check(nccl_.ncclGroupEnd(), "ncclGroupEnd", gathers_);
}

// In place: this rank's sums replace its own part of the send buffer.
void NcclCommunicator::sum_into_shards(const ReduceOp& op, const SendLayout& layout,
                                       const Region& send) {
  const auto own = [&](size_t i) {
    const ReduceSegment& s = op.segments[i];
    return send.data + layout.offsets[i] + rank() * s.numel * itemsize(s.wire_dtype);
  };
  nccl_.check(nccl_.ncclGroupStart(), "ncclGroupStart");
  for (size_t i = 0; i < op.segments.size(); ++i) {
    const ReduceSegment& s = op.segments[i];
    nccl_.check(nccl_.ncclReduceScatter(send.data + layout.offsets[i], own(i), s.numel,
                                        data_type(s.wire_dtype), nccl::kSum, sums_, stream()),
                "ncclReduceScatter", sums_);
  }
  nccl_.check(nccl_.ncclGroupEnd(), "ncclGroupEnd", sums_);
  for (size_t i = 0; i < op.segments.size(); ++i) {
    const ReduceSegment& s = op.segments[i];
    const Piece piece{own(i), s.shard, s.numel};
    convert({&piece, 1}, s.wire_dtype, s.shard_dtype, s.scale, s.accumulate, stream());
  }
}

void NcclCommunicator::sum_in_place(void* data, DType dtype, int64_t numel) {
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
