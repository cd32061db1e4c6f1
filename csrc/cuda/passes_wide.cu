// Passes that write float32 and float64, and copies.
#include "passes.cuh"

namespace fsdpx::cuda {

template void launch_convert<float>(const PieceTable&, DType, const Launch&);
template void launch_convert<double>(const PieceTable&, DType, const Launch&);
template void launch_reduce<float>(const SumTable&, DType, const Launch&);
template void launch_reduce<double>(const SumTable&, DType, const Launch&);

void launch_copy(const PieceTable& table, int64_t unit_bytes, const Launch& launch) {
  const unsigned blocks = launch.blocks(table.num_tiles);
  const auto copy = [&](auto unit) {
    using Unit = decltype(unit);
    convert_kernel<Unit, Unit><<<blocks, kNumThreads, 0, launch.stream>>>(table);
  };
  switch (unit_bytes) {
    case 1:
      copy(uint8_t{});
      break;
    case 2:
      copy(uint16_t{});
      break;
    case 4:
      copy(uint32_t{});
      break;
    default:
      copy(uint64_t{});
  }
  check_launch("copy");
}

}  // namespace fsdpx::cuda
