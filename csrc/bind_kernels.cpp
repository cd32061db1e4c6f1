// Python's view of the kernels: addresses and dtype codes as integers, checked by fsdpx.ops. Work
// is done without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bind_values.h"
#include "kernels.h"
#include "shard_passes.h"

namespace py = pybind11;

namespace fsdpx {
namespace {

using SpanTuple = std::tuple<uintptr_t, int64_t, int64_t>;  // address, numel, offset

template <typename SpanType>
std::vector<SpanType> to_spans(const std::vector<SpanTuple>& tuples) {
  std::vector<SpanType> spans;
  spans.reserve(tuples.size());
  for (const auto& [address, numel, offset] : tuples) {
    spans.push_back({pointer(address), numel, offset});
  }
  return spans;
}

void py_cast(uintptr_t src, int from, uintptr_t dst, int to, int64_t numel, double scale,
             bool accumulate) {
  const py::gil_scoped_release release;
  cast(pointer(src), to_dtype(from), pointer(dst), to_dtype(to), numel, scale, accumulate);
}

void py_pack(const std::vector<SpanTuple>& srcs, int from, uintptr_t flat, int to,
             int64_t flat_numel, double scale, bool accumulate) {
  const py::gil_scoped_release release;
  const std::vector<ConstSpan> spans = to_spans<ConstSpan>(srcs);
  pack(spans, to_dtype(from), pointer(flat), to_dtype(to), flat_numel, scale, accumulate);
}

void py_unpack(uintptr_t flat, int from, const std::vector<SpanTuple>& dsts, int to, double scale,
               bool accumulate) {
  const py::gil_scoped_release release;
  const std::vector<Span> spans = to_spans<Span>(dsts);
  unpack(pointer(flat), to_dtype(from), spans, to_dtype(to), scale, accumulate);
}

void py_reduce(const std::vector<uintptr_t>& srcs, int from, uintptr_t dst, int to, int64_t numel,
               double scale, bool accumulate) {
  const py::gil_scoped_release release;
  std::vector<const void*> sources;
  sources.reserve(srcs.size());
  for (uintptr_t address : srcs) sources.push_back(pointer(address));
  reduce(sources, to_dtype(from), pointer(dst), to_dtype(to), numel, scale, accumulate);
}

std::pair<double, bool> py_norm_and_check(uintptr_t src, int dtype, int64_t numel) {
  const py::gil_scoped_release release;
  const NormAndCheck result = norm_and_check(pointer(src), to_dtype(dtype), numel);
  return {result.square, result.not_finite != 0};
}

void py_adamw(const AdamWTuple& shard, double lr, std::pair<double, double> betas, double eps,
              double weight_decay, int64_t step, double grad_scale, bool maximize) {
  const py::gil_scoped_release release;
  const AdamWOptions options{lr,           betas.first, betas.second, eps,
                             weight_decay, step,        grad_scale,   maximize};
  adamw(to_adamw_shard(shard), options);
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("cast", &py_cast, py::arg("src"), py::arg("from_dtype"), py::arg("dst"),
        py::arg("to_dtype"), py::arg("numel"), py::arg("scale") = 1.0,
        py::arg("accumulate") = false);
  m.def("pack", &py_pack, py::arg("srcs"), py::arg("from_dtype"), py::arg("flat"),
        py::arg("to_dtype"), py::arg("flat_numel"), py::arg("scale") = 1.0,
        py::arg("accumulate") = false,
        "srcs: (address or 0 for zeros, numel, offset) of each span.");
  m.def("unpack", &py_unpack, py::arg("flat"), py::arg("from_dtype"), py::arg("dsts"),
        py::arg("to_dtype"), py::arg("scale") = 1.0, py::arg("accumulate") = false,
        "dsts: (address, numel, offset) of each span.");
  m.def("reduce", &py_reduce, py::arg("srcs"), py::arg("from_dtype"), py::arg("dst"),
        py::arg("to_dtype"), py::arg("numel"), py::arg("scale") = 1.0,
        py::arg("accumulate") = false);
  m.def("norm_and_check", &py_norm_and_check, py::arg("src"), py::arg("dtype"), py::arg("numel"),
        "The squared norm, and whether some element is not finite.");
  m.def("adamw", &py_adamw, py::arg("shard"), py::arg("lr"), py::arg("betas"), py::arg("eps"),
        py::arg("weight_decay"), py::arg("step"), py::arg("grad_scale") = 1.0,
        py::arg("maximize") = false,
        "shard: addresses of param, exp_avg, exp_avg_sq; address and dtype of grad, and of the "
        "copy (0: none); numel.");
  m.def("isa", &isa, "The instruction set that the kernels use.");
  m.def("set_isa", &set_isa, py::arg("name"),
        "\"avx512\", \"avx2\", \"portable\", or \"auto\" for the best that the machine has.");
}

}  // namespace fsdpx
