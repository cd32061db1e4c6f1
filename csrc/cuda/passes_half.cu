// Passes that write float16 and bfloat16.
#include "passes.cuh"

namespace fsdpx::cuda {

template void launch_convert<Float16>(const PieceTable&, DType, const Launch&);
template void launch_convert<BFloat16>(const PieceTable&, DType, const Launch&);
template void launch_reduce<Float16>(const SumTable&, DType, const Launch&);
template void launch_reduce<BFloat16>(const SumTable&, DType, const Launch&);

}  // namespace fsdpx::cuda
