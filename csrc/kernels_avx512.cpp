// The passes with AVX-512 F, BW, DQ, VL and F16C, on x86-64; empty elsewhere.
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__) || !defined(__F16C__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c"
#endif
#include "kernels_impl.h"

namespace fsdpx {

constinit const PassTable kAvx512Passes = make_table("avx512");

}  // namespace fsdpx
#endif
