// The passes for any machine.
#include "kernels_impl.h"

namespace fsdpx {

constinit const PassTable kPortablePasses = make_table("portable");

}  // namespace fsdpx
