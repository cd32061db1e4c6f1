// The passes with AVX2 and F16C, on x86-64; empty elsewhere.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mf16c"
#endif
#include "kernels_impl.h"

namespace fsdpx {

constinit const PassTable kAvx2Passes = make_table("avx2");

}  // namespace fsdpx
#endif
