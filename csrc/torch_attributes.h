// During forward a module's attributes are its full parameters: entries written into the instance's
// __dict__, which Python looks at before torch's `_parameters`. Outside they are removed again, so
// that everything else sees the sharded parameters.
#pragma once

#include <Python.h>

#include <vector>

namespace fsdpx {

class AttributeSwap {
 public:
  AttributeSwap() = default;
  ~AttributeSwap();
  AttributeSwap(const AttributeSwap&) = delete;
  AttributeSwap& operator=(const AttributeSwap&) = delete;

  // `dict` (the instance's) and `parameters` (its `_parameters`) are borrowed: the owner of the
  // unit keeps them alive.
  void add(PyObject* dict, PyObject* key, PyObject* full, PyObject* parameters, PyObject* sharded);
  void clear();
  // Only where `parameters[key]` is still the sharded parameter: a tensor that the user put there
  // (functional_call) wins.
  void swap_in();
  void swap_out();

 private:
  struct Entry {
    PyObject* dict;
    PyObject* key;
    PyObject* full;
    PyObject* parameters;
    PyObject* sharded;
  };
  std::vector<Entry> entries_;
};

}  // namespace fsdpx
