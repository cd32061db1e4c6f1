// Passes that write float32 and float64, and copies.
#include "passes.cuh"

namespace fsdpx::cuda {

template void launch_convert<float>(const PieceTable&, unsigned, DType, cudaStream_t);
template void launch_convert<double>(const PieceTable&, unsigned, DType, cudaStream_t);
template void launch_reduce<float>(const SumTable&, unsigned, DType, cudaStream_t);
template void launch_reduce<double>(const SumTable&, unsigned, DType, cudaStream_t);

void launch_copy(const PieceTable& table, unsigned num_tiles, int64_t unit_bytes,
                 cudaStream_t stream) {
  const auto launch = [&](auto unit) {
    using Unit = decltype(unit);
    convert_kernel<Unit, Unit><<<num_tiles, kNumThreads, 0, stream>>>(table);
  };
  switch (unit_bytes) {
    case 1:
      launch(uint8_t{});
      break;
    case 2:
      launch(uint16_t{});
      break;
    case 4:
      launch(uint32_t{});
      break;
    default:
      launch(uint64_t{});
  }
  check_launch("copy");
}

}  // namespace fsdpx::cuda
