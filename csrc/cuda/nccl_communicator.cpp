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

NcclCommunicator::NcclCommunicator(Surroundings surroundings)
    : DeviceCommunicator("nccl", surroundings,
                         std::make_shared<PlainMemory>(surroundings.device())),
      connection_(surroundings),
      gathers_(connection_.split()),
      sums_(connection_.split()) {}

void NcclCommunicator::begin_group() {
  group_.emplace(connection_);
  const nccl::Result result = nccl_.ncclGroupStart();
  if (result != nccl::kSuccess) group_.reset();
  nccl_.check(result, "ncclGroupStart");
}

void NcclCommunicator::end_group() {
  const nccl::Result result = nccl_.ncclGroupEnd();
  group_.reset();
  nccl_.check(result, "ncclGroupEnd");
}

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
  const nccl::Connection::Calls calls(connection_);
  nccl_.check(nccl_.ncclAllReduce(data, data, numel, data_type(dtype), nccl::kSum, sums_, stream()),
              "ncclAllReduce", sums_);
}

}  // namespace fsdpx::cuda
