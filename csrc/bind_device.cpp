// Python's view of the CUDA passes: addresses, dtype codes and a stream as integers, checked by
// fsdpx.ops. The caller has made the stream's device the current one. Without CUDA in the build,
// every call says so.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bind_values.h"
#include "check.h"
#ifdef FSDPX_CUDA
#include "cuda/kernels.h"
#include "cuda/shard_passes.h"
#endif

namespace py = pybind11;

namespace fsdpx {
namespace {

#ifdef FSDPX_CUDA
constexpr int64_t kNormWorkspaceBytes = cuda::kNormWorkspace;
#else
constexpr int64_t kNormWorkspaceBytes = 0;
namespace cuda {  // what stands for the passes of cuda/ in a build without them

struct Piece {
  const void* src;
  void* dst;
  int64_t numel;
};

struct GatherPiece {
  const void* src;
  int64_t numel;
  int64_t offset;
};

template <typename... Args>
void absent(const Args&...) {
  check(false, "this build has no CUDA passes; build it with FSDPX_CUDA=1");
}
constexpr auto convert = [](const auto&... args) { absent(args...); };
constexpr auto gather = [](const auto&... args) { absent(args...); };
constexpr auto reduce = [](const auto&... args) { absent(args...); };
constexpr auto norm_and_check = [](const auto&... args) { absent(args...); };
constexpr auto adamw = [](const auto&... args) { absent(args...); };

}  // namespace cuda
#endif

using PieceTuple = std::tuple<uintptr_t, uintptr_t, int64_t>;  // source, destination, numel

void py_convert(const std::vector<PieceTuple>& tuples, int from, int to, double scale,
                bool accumulate, uintptr_t stream) {
  std::vector<cuda::Piece> pieces;
  pieces.reserve(tuples.size());
  for (const auto& [src, dst, numel] : tuples) {
    pieces.push_back({pointer(src), pointer(dst), numel});
  }
  cuda::convert(pieces, to_dtype(from), to_dtype(to), scale, accumulate, pointer(stream));
}

void py_gather(const std::vector<std::tuple<uintptr_t, int64_t, int64_t>>& tuples,
               const std::vector<uintptr_t>& addresses, int from, int to, uintptr_t stream) {
  std::vector<cuda::GatherPiece> pieces;
  for (const auto& [src, numel, offset] : tuples) pieces.push_back({pointer(src), numel, offset});
  std::vector<void*> peers;
  for (uintptr_t address : addresses) peers.push_back(pointer(address));
  cuda::gather(pieces, peers, to_dtype(from), to_dtype(to), pointer(stream));
}

void py_reduce(const std::vector<uintptr_t>& srcs, int from, uintptr_t dst, int to, int64_t numel,
               double scale, bool accumulate, uintptr_t stream) {
  std::vector<const void*> sources;
  sources.reserve(srcs.size());
  for (uintptr_t address : srcs) sources.push_back(pointer(address));
  cuda::reduce(sources, to_dtype(from), pointer(dst), to_dtype(to), numel, scale, accumulate,
               pointer(stream));
}

void py_norm_and_check(uintptr_t src, int dtype, int64_t numel, uintptr_t workspace, uintptr_t out,
                       uintptr_t stream) {
  cuda::norm_and_check(pointer(src), to_dtype(dtype), numel, pointer(workspace), pointer(out),
                       pointer(stream));
}

void py_adamw(const AdamWTuple& shard, double lr, std::pair<double, double> betas, double eps,
              double weight_decay, int64_t step, double grad_scale, bool maximize,
              uintptr_t stream) {
  const AdamWOptions options{lr,           betas.first, betas.second, eps,
                             weight_decay, step,        grad_scale,   maximize};
  cuda::adamw(to_adamw_shard(shard), options, pointer(stream));
}

}  // namespace

void bind_device(py::module_& m) {
  m.attr("NORM_WORKSPACE_BYTES") = kNormWorkspaceBytes;
  m.def("device_convert", &py_convert, py::arg("pieces"), py::arg("from_dtype"),
        py::arg("to_dtype"), py::arg("scale"), py::arg("accumulate"), py::arg("stream"),
        "pieces: (address or 0 for zeros, destination, numel) of each.");
  m.def("device_gather", &py_gather, py::arg("pieces"), py::arg("peers"), py::arg("from_dtype"),
        py::arg("to_dtype"), py::arg("stream"),
        "pieces: (address, numel, bytes after each peer's address) of each.");
  m.def("device_reduce", &py_reduce, py::arg("srcs"), py::arg("from_dtype"), py::arg("dst"),
        py::arg("to_dtype"), py::arg("numel"), py::arg("scale"), py::arg("accumulate"),
        py::arg("stream"));
  m.def("device_norm_and_check", &py_norm_and_check, py::arg("src"), py::arg("dtype"),
        py::arg("numel"), py::arg("workspace"), py::arg("out"), py::arg("stream"),
        "out: two floats (doubles for float64), the squared norm and 1 or 0.");
  m.def("device_adamw", &py_adamw, py::arg("shard"), py::arg("lr"), py::arg("betas"),
        py::arg("eps"), py::arg("weight_decay"), py::arg("step"), py::arg("grad_scale"),
        py::arg("maximize"), py::arg("stream"));
}

}  // namespace fsdpx
