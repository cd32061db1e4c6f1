// Shared by the bindings of communicators.
#pragma once

#include <pybind11/pybind11.h>

#include "exchange_communicator.h"

namespace fsdpx {

// A Python callable (send address, recv address, nbytes) as a primitive. It runs on the thread that
// runs the stream's tasks and takes the GIL to issue.
ByteCollectives::Call byte_collective(pybind11::function function);

// The flags of a reduction whose event has been waited for. On a GPU they come beside it: this
// waits for the other ranks' CPUs, without the GIL.
std::vector<uint8_t> used_on_any_rank(const ReduceOp& op);

// Waits as Event::wait does, without the GIL and with an eye on Ctrl-C.
void wait_for(Event& event, double seconds);

}  // namespace fsdpx
