#include "device_exchange.h"

#include <utility>

#include "../check.h"
#include "kernels.h"

namespace fsdpx::cuda {

DeviceExchangeCommunicator::DeviceExchangeCommunicator(std::string kind, Surroundings surroundings,
                                                       ByteCollectives calls)
    : DeviceCommunicator(std::move(kind), std::move(surroundings)), calls_(std::move(calls)) {}

char* DeviceExchangeCommunicator::scratch(int64_t nbytes) {
  if (nbytes > scratch_.nbytes) {
    check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
    scratch_ = {};
    scratch_ = make_region(nbytes);
  }
  return scratch_.data;
}

void DeviceExchangeCommunicator::gather(const GatherOp& op, const Region& region) {
  cast_own(op, region);
  for (const GatherSegment& s : op.segments) {
    const int64_t nbytes = s.numel * itemsize(s.dst_dtype);
    char* const all = region.data + op.place.offset + s.dst_offset;
    calls_.all_gather(all + rank() * nbytes, all, nbytes);
  }
}

void DeviceExchangeCommunicator::sum_pieces(const char* send, DType wire, int64_t numel,
                                            void* target, DType to, double scale, bool accumulate) {
  const int64_t piece = numel * itemsize(wire);
  char* const receive = scratch(piece * size());
  calls_.all_to_all(send, receive, piece);
  std::vector<const void*> pieces(size());
  for (int peer = 0; peer < size(); ++peer) pieces[peer] = receive + peer * piece;
  reduce(pieces, wire, target, to, numel, scale, accumulate, stream());
}

void DeviceExchangeCommunicator::sum_into_shards(const ReduceOp& op, const SendLayout& layout,
                                                 const Region& send) {
  for (size_t i = 0; i < op.segments.size(); ++i) {
    const ReduceSegment& s = op.segments[i];
    sum_pieces(send.data + layout.offsets[i], s.wire_dtype, s.numel, s.shard, s.shard_dtype,
               s.scale, s.accumulate);
  }
}

// Equal pieces, as the primitives want them: rank r sums the rth, then everyone gets all sums.
void DeviceExchangeCommunicator::sum_in_place(void* data, DType dtype, int64_t numel) {
  const int64_t piece_numel = (numel + size() - 1) / size();
  const int64_t piece = piece_numel * itemsize(dtype), padded = piece * size();
  char* const all = scratch(3 * padded);
  char* const receive = all + padded;
  char* const sums = receive + padded;
  const int64_t nbytes = numel * itemsize(dtype);
  check_cuda(cudaMemsetAsync(all, 0, padded, stream()), "cudaMemsetAsync");
  check_cuda(cudaMemcpyAsync(all, data, nbytes, cudaMemcpyDeviceToDevice, stream()),
             "cudaMemcpyAsync");
  calls_.all_to_all(all, receive, piece);
  std::vector<const void*> pieces(size());
  for (int peer = 0; peer < size(); ++peer) pieces[peer] = receive + peer * piece;
  char* const own = sums + rank() * piece;
  reduce(pieces, dtype, own, dtype, piece_numel, 1.0, false, stream());
  calls_.all_gather(own, sums, piece);
  check_cuda(cudaMemcpyAsync(data, sums, nbytes, cudaMemcpyDeviceToDevice, stream()),
             "cudaMemcpyAsync");
}

}  // namespace fsdpx::cuda
