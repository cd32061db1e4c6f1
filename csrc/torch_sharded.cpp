#include "torch_sharded.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "check.h"

namespace py = pybind11;

namespace fsdpx {

namespace {

const at::Tensor& tensor_at(const py::list& tensors, size_t i) {
  PyObject* const tensor = PyList_GET_ITEM(tensors.ptr(), i);
  if (!THPVariable_Check(tensor)) throw py::type_error("fsdpx: expected a list of tensors");
  return THPVariable_Unpack(tensor);
}

// This rank's piece, or nothing: no plain tensor has one.
py::object piece_of(PyObject* object) {
  static PyObject* const name = PyUnicode_InternFromString("_local");
  if (THPVariable_CheckExact(object)) return {};
  PyObject* const piece = PyObject_GetAttr(object, name);
  if (piece == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(piece);
}

}  // namespace

void count_write(py::handle written) {
  PyObject* const object = written.ptr();
  if (PyList_Check(object) || PyTuple_Check(object)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i)
      count_write(PySequence_Fast_GET_ITEM(object, i));
    return;
  }
  const py::object piece = piece_of(object);
  // While torch.compile traces, pieces are stand-ins that have no counter.
  if (piece && THPVariable_CheckExact(piece.ptr()))
    torch::autograd::impl::bump_version(THPVariable_Unpack(piece.ptr()));
}

void set_gradients(const py::list& parameters, const py::list& gradients,
                   const std::vector<bool>& wanted, bool frozen_too) {
  check(parameters.size() == wanted.size() && gradients.size() == wanted.size(),
        "set_gradients: ", wanted.size(), " are wanted of ", parameters.size(), " parameters with ",
        gradients.size(), " gradients");
  for (size_t i = 0; i < wanted.size(); ++i) {
    const at::Tensor& parameter = tensor_at(parameters, i);
    if (wanted[i] && (frozen_too || parameter.requires_grad()))
      parameter.mutable_grad() = tensor_at(gradients, i);
  }
}

bool any_gradients(const py::list& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i)
    if (tensor_at(parameters, i).grad().defined()) return true;
  return false;
}

}  // namespace fsdpx
