#include "nccl_communicator.h"

#include <utility>

#include "../check.h"
#include "nccl_memory.h"

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

std::shared_ptr<NcclCommunicator> NcclCommunicator::connect(const Surroundings& surroundings,
                                                            const std::string& source) {
  check(source == "plain" || source == "window", "NCCL can't use '", source,
        "' memory; use 'plain' or 'window'");
  std::string problem;
  if (source == "window" && !nccl::library().has_memory())
    problem = "NCCL " + nccl::library().version_text() + " has no memory: 2.19 or newer is needed";
  check_all(surroundings, problem, "register memory with NCCL");
  Comms comms{std::make_shared<nccl::Connection>(surroundings), nullptr, nullptr};
  comms.gathers = comms.connection->split();
  comms.sums = comms.connection->split();
  std::shared_ptr<DeviceMemory> memory = std::make_shared<PlainMemory>(surroundings.device());
  if (source == "window")
    memory = std::make_shared<RegisteredMemory>(surroundings.device(), comms.connection,
                                                std::vector{comms.gathers, comms.sums});
  return std::make_shared<NcclCommunicator>(surroundings, std::move(memory), std::move(comms));
}

NcclCommunicator::NcclCommunicator(Surroundings surroundings, std::shared_ptr<DeviceMemory> memory,
                                   Comms comms)
    : DeviceCommunicator("nccl", std::move(surroundings), std::move(memory)),
      comms_(std::move(comms)) {}

void NcclCommunicator::begin_group() {
  group_.emplace(*comms_.connection);
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
  nccl_.check(nccl_.ncclAllGather(own, data, nbytes, nccl::kInt8, comms_.gathers, stream()),
              "ncclAllGather", comms_.gathers);
}

void NcclCommunicator::reduce_scatter_in_place(void* data, DType dtype, int64_t numel) {
  char* const own = static_cast<char*>(data) + rank() * numel * itemsize(dtype);
  nccl_.check(nccl_.ncclReduceScatter(data, own, numel, data_type(dtype), nccl::kSum, comms_.sums,
                                      stream()),
              "ncclReduceScatter", comms_.sums);
}

void NcclCommunicator::all_reduce_in_place(void* data, DType dtype, int64_t numel) {
  const nccl::Connection::Calls calls(*comms_.connection);
  nccl_.check(
      nccl_.ncclAllReduce(data, data, numel, data_type(dtype), nccl::kSum, comms_.sums, stream()),
      "ncclAllReduce", comms_.sums);
}

}  // namespace fsdpx::cuda
