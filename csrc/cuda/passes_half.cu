// Passes that write float16 and bfloat16.
#include "passes.cuh"

namespace fsdpx::cuda {

template void launch_convert<Float16>(const PieceTable&, unsigned, DType, cudaStream_t);
template void launch_convert<BFloat16>(const PieceTable&, unsigned, DType, cudaStream_t);
template void launch_reduce<Float16>(const SumTable&, unsigned, DType, cudaStream_t);
template void launch_reduce<BFloat16>(const SumTable&, unsigned, DType, cudaStream_t);

}  // namespace fsdpx::cuda
