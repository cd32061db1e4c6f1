// Loops over many sharded tensors. Python makes them (fsdpx/parameter/tensor.py); here only their
// attribute `_local`, this rank's piece, is known.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace fsdpx {

// Counts a write on the piece of a sharded tensor, or of each in a list; others are left alone.
void count_write(pybind11::handle written);

// Sets `.grad` of each wanted parameter to the gradient at its place; of frozen ones only if told.
void set_gradients(const pybind11::list& parameters, const pybind11::list& gradients,
                   const std::vector<bool>& wanted, bool frozen_too);
bool any_gradients(const pybind11::list& parameters);

}  // namespace fsdpx
