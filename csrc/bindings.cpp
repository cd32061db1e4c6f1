// The native module fsdpx._C: each part binds its own.
#include <pybind11/pybind11.h>

namespace fsdpx {
void bind_kernels(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_comm(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_torch(pybind11::module_& m);
}  // namespace fsdpx

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native core of fsdpx.";
  m.attr("torch_version") = FSDPX_TORCH_VERSION;
  fsdpx::bind_kernels(m);
  fsdpx::bind_device(m);
  fsdpx::bind_comm(m);
  fsdpx::bind_cuda(m);
  fsdpx::bind_torch(m);
}
