#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include "bind_cuda.h"
#include "torch_access.h"
#include "torch_cuda.h"
#include "torch_sharded.h"
#include "torch_unit.h"

namespace py = pybind11;

namespace fsdpx {

namespace {

at::ScalarType scalar_type(const py::object& dtype) {
  if (!THPDtype_Check(dtype.ptr())) throw py::type_error("fsdpx: expected a torch.dtype");
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

using SegmentTuple =
    std::tuple<int, int, int, int, int64_t, std::vector<std::tuple<int64_t, int64_t, int64_t>>>;

SegmentLayout segment_layout(const SegmentTuple& values) {
  const auto& [gradient, wire, accumulator, shard, shard_numel, entries] = values;
  SegmentLayout layout{static_cast<DType>(gradient),
                       static_cast<DType>(wire),
                       static_cast<DType>(accumulator),
                       static_cast<DType>(shard),
                       shard_numel,
                       {}};
  for (const auto& [leaf, offset, numel] : entries) layout.entries.push_back({leaf, offset, numel});
  return layout;
}

std::unique_ptr<Unit> make_unit(const std::string& name, int64_t gathered_bytes,
                                const at::Device& device,
                                const std::vector<SegmentTuple>& segments) {
  std::vector<SegmentLayout> layouts;
  for (const auto& segment : segments) layouts.push_back(segment_layout(segment));
  return std::make_unique<Unit>(name, gathered_bytes, device, std::move(layouts));
}

void set_names(Unit& unit, const std::string& name,
               const std::vector<std::tuple<int64_t, int64_t, std::string>>& parameters) {
  std::vector<ParameterRange> ranges;
  for (const auto& [begin, end, parameter] : parameters) ranges.push_back({begin, end, parameter});
  unit.storage().set_names(name, std::move(ranges));
}

Reduction reduce(Unit& unit, Stream& stream, std::shared_ptr<Communicator> communicator,
                 Recorder* recorder, double scale,
                 const std::vector<std::tuple<int64_t, uintptr_t, bool, uintptr_t>>& targets,
                 const std::vector<bool>& used) {
  std::vector<SegmentTarget> native_targets;
  for (const auto& [segment, shard, accumulate, accumulated] : targets)
    native_targets.push_back({segment, shard, accumulate, accumulated});
  return unit.reduce(stream, std::move(communicator), recorder, scale, native_targets,
                     {used.begin(), used.end()});
}

void bind_unit(py::module_& m) {
  py::class_<Unit>(
      m, "Unit",
      "The native half of a sharding unit: gathered storage, leaves, gradients and attributes.")
      .def(py::init(&make_unit), py::arg("name"), py::arg("gathered_bytes"), py::arg("device"),
           py::arg("segments"))
      .def("set_owner", &Unit::set_owner)
      .def_static("owner_of", &Unit::owner_of)
      .def("set_names", &set_names)
      .def(
          "attach",
          [](Unit& unit, uintptr_t data, bool newer, std::shared_ptr<Event> gathered) {
            unit.attach(reinterpret_cast<void*>(data), newer, std::move(gathered));
          },
          py::arg("data"), py::arg("newer") = false, py::arg("gathered").none(true) = nullptr,
          "Whoever reads the memory on another stream than the caller's waits for `gathered`.")
      .def("detach", &Unit::detach)
      .def_property_readonly("edited", &Unit::edited)
      .def("forget_edits", &Unit::forget_edits)
      .def_property_readonly("attached", [](const Unit& unit) { return unit.storage().attached(); })
      .def("segment",
           [](const Unit& unit, int64_t offset, int64_t numel, const py::object& dtype) {
             return unit.storage().segment(offset, numel, scalar_type(dtype));
           })
      .def("set_notify", &Unit::set_notify)
      .def_readonly("num_holds", &Unit::num_holds)
      .def("add_leaf", &Unit::add_leaf)
      .def("watch", &Unit::watch)
      .def("num_expected", &Unit::num_expected)
      .def("forget_backward", &Unit::forget_backward)
      .def("drop_gradients", &Unit::drop_gradients)
      .def("took_graph", &Unit::took_graph)
      .def("has_gradients", &Unit::has_gradients)
      .def("accumulate", &Unit::accumulate)
      .def("reduce", &reduce)
      .def("add_attribute",
           [](Unit& unit, py::handle dict, py::handle key, py::handle full, py::handle parameters,
              py::handle sharded) {
             unit.attributes().add(dict.ptr(), key.ptr(), full.ptr(), parameters.ptr(),
                                   sharded.ptr());
           })
      .def("clear_attributes", [](Unit& unit) { unit.attributes().clear(); })
      .def("swap_in", [](Unit& unit) { unit.attributes().swap_in(); })
      .def("swap_out", [](Unit& unit) { unit.attributes().swap_out(); });
  py::class_<Reduction>(m, "Reduction", "A reduce-scatter in flight.")
      .def_property_readonly("event", [](const Reduction& reduction) { return reduction.event; })
      .def_property_readonly("used", [](const Reduction& reduction) {
        const auto used = used_on_any_rank(*reduction.op);
        return std::vector<bool>(used.begin(), used.end());
      });
}

}  // namespace

void bind_torch(py::module_& m) {
  register_access_kernels();
  bind_unit(m);
  m.def("device_stream", &make_device_stream, py::arg("device"), py::arg("stream"),
        "The communication stream over `torch.cuda.Stream.cuda_stream`, which must outlive it.");
  m.def("count_write", &count_write);
  m.def("set_gradients", &set_gradients);
  m.def("any_gradients", &any_gradients);
  m.def("at_backward_end", &at_backward_end);
  m.def("cast_inputs", [](py::object inputs, const py::object& dtype, py::object fallback) {
    return cast_inputs(std::move(inputs), scalar_type(dtype), std::move(fallback));
  });
}

}  // namespace fsdpx
