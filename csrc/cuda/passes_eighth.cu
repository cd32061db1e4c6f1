// Passes that write float8.
#include "passes.cuh"

namespace fsdpx::cuda {

template void launch_convert<Float8E4M3>(const PieceTable&, DType, const Launch&);
template void launch_convert<Float8E5M2>(const PieceTable&, DType, const Launch&);
template void launch_reduce<Float8E4M3>(const SumTable&, DType, const Launch&);
template void launch_reduce<Float8E5M2>(const SumTable&, DType, const Launch&);

}  // namespace fsdpx::cuda
