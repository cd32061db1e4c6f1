// Passes that write float8.
#include "passes.cuh"

namespace fsdpx::cuda {

template void launch_convert<Float8E4M3>(const PieceTable&, unsigned, DType, cudaStream_t);
template void launch_convert<Float8E5M2>(const PieceTable&, unsigned, DType, cudaStream_t);
template void launch_reduce<Float8E4M3>(const SumTable&, unsigned, DType, cudaStream_t);
template void launch_reduce<Float8E5M2>(const SumTable&, unsigned, DType, cudaStream_t);

}  // namespace fsdpx::cuda
