// Shared by the bindings of communicators.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "communicator.h"

namespace fsdpx {

// Holds a Python object for a task. Released on any thread, which takes the GIL for it; when the
// interpreter is ending, that would hang, and the object is left alone.
std::shared_ptr<void> keep(pybind11::object object);

// The flags of a reduction whose event has been waited for. On a GPU they come beside it: this
// waits for the other ranks' CPUs, without the GIL.
std::vector<uint8_t> used_on_any_rank(const ReduceOp& op);

// Waits as Event::wait does, without the GIL and with an eye on Ctrl-C.
void wait_for(Event& event, double seconds);

}  // namespace fsdpx
