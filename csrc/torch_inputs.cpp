// Casting a forward's inputs without pytree: most nests are exact tuples, lists and dicts.
#include <torch/csrc/autograd/python_variable.h>

#include "torch_unit.h"

namespace py = pybind11;

namespace fsdpx {

namespace {

class Caster {
 public:
  Caster(at::ScalarType dtype, py::object fallback)
      : dtype_(dtype), fallback_(std::move(fallback)) {}

  py::object cast(py::handle value) const {
    PyObject* const object = value.ptr();
    if (THPVariable_CheckExact(object)) return cast_tensor(value);
    if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) return cast_sequence(value);
    if (PyDict_CheckExact(object)) return cast_dict(value);
    if (object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
        PyFloat_CheckExact(object) || PyUnicode_CheckExact(object)) {
      return py::reinterpret_borrow<py::object>(value);
    }
    return fallback_(value);
  }

 private:
  py::object cast_tensor(py::handle value) const {
    const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
    if (!tensor.is_floating_point() || tensor.scalar_type() == dtype_)
      return py::reinterpret_borrow<py::object>(value);
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor.to(dtype_)));
  }

  py::object cast_sequence(py::handle value) const {
    const bool is_tuple = PyTuple_CheckExact(value.ptr());
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value.ptr());
    py::list result;
    bool changed = false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* const item = PySequence_Fast_GET_ITEM(value.ptr(), i);
      py::object out = cast(item);
      changed |= out.ptr() != item;
      result.append(std::move(out));
    }
    if (!changed) return py::reinterpret_borrow<py::object>(value);
    return is_tuple ? py::object(py::tuple(result)) : py::object(result);
  }

  py::object cast_dict(py::handle value) const {
    py::object result = py::reinterpret_borrow<py::object>(value);
    bool changed = false;
    for (const auto& [key, item] : py::reinterpret_borrow<py::dict>(value)) {
      py::object out = cast(item);
      if (out.ptr() == item.ptr()) continue;
      if (!changed) result = py::reinterpret_steal<py::object>(PyDict_Copy(value.ptr()));
      changed = true;
      PyDict_SetItem(result.ptr(), key.ptr(), out.ptr());
    }
    return result;
  }

  at::ScalarType dtype_;
  py::object fallback_;
};

}  // namespace

py::object cast_inputs(py::object inputs, at::ScalarType dtype, py::object fallback) {
  return Caster(dtype, std::move(fallback)).cast(inputs);
}

}  // namespace fsdpx
