// Gather on read: every operator that is handed a view of a unit passes through here first.
//
// [Note: Gather on read] Views of a unit carry one extra dispatch key below autograd and Python.
// Whoever calls an operator on one (forward, backward, double backward, recomputation, a user's
// hook, an operator inside a tensor subclass), our kernel for that key runs first: when the unit is
// detached and a backward is running, it asks the unit's owner to gather it; then it passes the
// call on. So a unit may be freed at any moment: the next read gathers it again. Outside a backward
// a detached unit is an error that names the parameter.
#pragma once

#include <c10/core/DispatchKey.h>

namespace fsdpx {

// Unused by torch itself except for user-defined random generators; it is below autograd and above
// the backends.
constexpr auto kAccessKey = c10::DispatchKey::CustomRNGKeyId;

// Registers the kernels; called once, at import of the extension.
void register_access_kernels();

}  // namespace fsdpx
