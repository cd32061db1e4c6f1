// Python's view of the communicators on GPUs. In a build without CUDA the functions are there and
// say so.
#include "bind_cuda.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>

#include "check.h"

#ifdef FSDPX_CUDA
#include "cuda/device_communicator.h"
#include "cuda/device_exchange.h"
#include "cuda/device_links.h"
#include "cuda/nccl_communicator.h"
#include "cuda/nvlink_communicator.h"
#endif

namespace py = pybind11;

namespace fsdpx {
namespace {

using std::shared_ptr;

#ifdef FSDPX_CUDA
constexpr bool kHasCuda = true;

cuda::Surroundings surroundings(const shared_ptr<Stream>& stream,
                                const shared_ptr<Communicator>& control,
                                const shared_ptr<Stream>& control_stream, double timeout) {
  auto device_stream = std::dynamic_pointer_cast<cuda::DeviceStream>(stream);
  check(device_stream != nullptr, "a communicator on a GPU needs a CUDA stream");
  return {std::move(device_stream), control, control_stream, timeout};
}

shared_ptr<Communicator> local_communicator(const shared_ptr<Stream>& stream,
                                            const shared_ptr<Communicator>& control,
                                            const shared_ptr<Stream>& control_stream,
                                            double timeout) {
  check(control->size() == 1, "the local communicator is for one rank, not ", control->size());
  const auto around = surroundings(stream, control, control_stream, timeout);
  return std::make_shared<cuda::DeviceCommunicator>(
      "local", around, std::make_shared<cuda::PlainMemory>(around.device()));
}

// Python callables are run with the GIL; what they raise must not leave it.
template <typename... Args>
void call(const shared_ptr<void>& held, Args... args) {
  const py::gil_scoped_acquire gil;
  try {
    (*static_cast<py::object*>(held.get()))(args...);
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(error.what());
  }
}

std::function<void(void*, DType, int64_t)> typed_collective(py::function function) {
  return [held = keep(std::move(function))](void* data, DType dtype, int64_t numel) {
    call(held, reinterpret_cast<uintptr_t>(data), static_cast<int>(dtype), numel);
  };
}

shared_ptr<Communicator> exchange_on_device(const shared_ptr<Stream>& stream,
                                            const shared_ptr<Communicator>& control,
                                            const shared_ptr<Stream>& control_stream,
                                            double timeout, py::function all_gather,
                                            py::function reduce_scatter, py::function all_reduce) {
  const auto gather = [held = keep(std::move(all_gather))](void* data, int64_t nbytes) {
    call(held, reinterpret_cast<uintptr_t>(data), nbytes);
  };
  return std::make_shared<cuda::DeviceExchange>(
      "c10d", surroundings(stream, control, control_stream, timeout),
      cuda::DeviceCollectives{gather, typed_collective(std::move(reduce_scatter)),
                              typed_collective(std::move(all_reduce))});
}

shared_ptr<Communicator> nccl_communicator(const shared_ptr<Stream>& stream,
                                           const shared_ptr<Communicator>& control,
                                           const shared_ptr<Stream>& control_stream, double timeout,
                                           const std::string& memory) {
  const py::gil_scoped_release nogil;  // it waits for the other ranks
  return cuda::NcclCommunicator::connect(surroundings(stream, control, control_stream, timeout),
                                         memory);
}

shared_ptr<Communicator> nvlink_communicator(const shared_ptr<Stream>& stream,
                                             const shared_ptr<Communicator>& control,
                                             const shared_ptr<Stream>& control_stream,
                                             double timeout, bool copies,
                                             const std::string& memory) {
  const py::gil_scoped_release nogil;  // it waits for the other ranks
  const auto around = surroundings(stream, control, control_stream, timeout);
  return std::make_shared<cuda::NvlinkCommunicator>(around, cuda::make_memory(memory, around),
                                                    copies);
}

std::string gpu_bus_id(int device) { return cuda::bus_id(device); }
bool may_have_nvlink(int device, const std::string& other) {
  return cuda::may_have_nvlink(device, other);
}

void check_usable(const shared_ptr<Communicator>& communicator) {
  if (const auto on_device = std::dynamic_pointer_cast<cuda::DeviceCommunicator>(communicator))
    on_device->check_usable();
}

int nccl_version() { return cuda::nccl::library().version; }

bool wait_for_peers(const shared_ptr<Communicator>& communicator, double seconds) {
  const py::gil_scoped_release nogil;
  const auto on_device = std::dynamic_pointer_cast<cuda::DeviceCommunicator>(communicator);
  return on_device == nullptr || on_device->wait_for_peers(seconds);
}
#else
constexpr bool kHasCuda = false;

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "fsdpx: this build has no CUDA: build fsdpx where nvcc is found and torch has CUDA");
}

using Streams = const shared_ptr<Stream>&;
using Control = const shared_ptr<Communicator>&;
shared_ptr<Communicator> local_communicator(Streams, Control, Streams, double) { refuse(); }
shared_ptr<Communicator> exchange_on_device(Streams, Control, Streams, double, py::function,
                                            py::function, py::function) {
  refuse();
}
shared_ptr<Communicator> nccl_communicator(Streams, Control, Streams, double, const std::string&) {
  refuse();
}
shared_ptr<Communicator> nvlink_communicator(Streams, Control, Streams, double, bool,
                                             const std::string&) {
  refuse();
}
std::string gpu_bus_id(int) { refuse(); }
bool may_have_nvlink(int, const std::string&) { refuse(); }
void check_usable(Control) {}
int nccl_version() { refuse(); }
bool wait_for_peers(Control, double) { return true; }
#endif

}  // namespace

void bind_cuda(py::module_& m) {
  m.attr("has_cuda") = kHasCuda;
  m.def("local_communicator", &local_communicator, py::arg("stream"), py::arg("control"),
        py::arg("control_stream"), py::arg("timeout"), "For one rank on a GPU.");
  m.def("exchange_on_device", &exchange_on_device, py::arg("stream"), py::arg("control"),
        py::arg("control_stream"), py::arg("timeout"), py::arg("all_gather"),
        py::arg("reduce_scatter"), py::arg("all_reduce"),
        "In place, enqueued on the stream: all_gather(address, bytes per rank), the others "
        "(address, dtype, numel).");
  m.def("nccl_communicator", &nccl_communicator, py::arg("stream"), py::arg("control"),
        py::arg("control_stream"), py::arg("timeout"), py::arg("memory"),
        "Collective; an error on every rank where some did not connect in time.");
  m.def("nvlink_communicator", &nvlink_communicator, py::arg("stream"), py::arg("control"),
        py::arg("control_stream"), py::arg("timeout"), py::arg("copies"), py::arg("memory"),
        "Collective; an error on every rank where some cannot map another's memory.");
  m.def("gpu_bus_id", &gpu_bus_id, py::arg("device"), "The name of a GPU in every process.");
  m.def("may_have_nvlink", &may_have_nvlink, py::arg("device"), py::arg("bus_id"),
        "False where peer access to that GPU goes over PCIe.");
  m.def("check_usable", &check_usable, py::arg("communicator"),
        "Raises what broke a communicator on a GPU; a CPU's tells by the end of its collectives.");
  m.def("nccl_version", &nccl_version, "As NCCL writes it; an error where it is missing or old.");
  m.def("wait_for_peers", &wait_for_peers, py::arg("communicator"), py::arg("seconds"),
        "Whether all ranks have closed it, and so unmapped its memory, within `seconds`.");
}

}  // namespace fsdpx
