#include "torch_attributes.h"

namespace fsdpx {

AttributeSwap::~AttributeSwap() { clear(); }

void AttributeSwap::add(PyObject* dict, PyObject* key, PyObject* full, PyObject* parameters,
                        PyObject* sharded) {
  Py_INCREF(key);
  Py_INCREF(full);
  Py_INCREF(sharded);
  entries_.push_back({dict, key, full, parameters, sharded});
}

void AttributeSwap::clear() {
  for (const auto& entry : entries_) {
    Py_DECREF(entry.key);
    Py_DECREF(entry.full);
    Py_DECREF(entry.sharded);
  }
  entries_.clear();
}

void AttributeSwap::swap_in() {
  for (const auto& entry : entries_) {
    if (PyDict_GetItem(entry.parameters, entry.key) == entry.sharded)
      PyDict_SetItem(entry.dict, entry.key, entry.full);
  }
}

void AttributeSwap::swap_out() {
  for (const auto& entry : entries_) {
    if (PyDict_GetItem(entry.dict, entry.key) == entry.full) PyDict_DelItem(entry.dict, entry.key);
  }
}

}  // namespace fsdpx
