#include "comm_layout.h"

#include <algorithm>

namespace fsdpx {
namespace {

// Elements [first, last) of every rank's piece, end to end, as a segment.
ReduceSegment slice(const ReduceSegment& s, int size, int64_t first, int64_t last) {
  ReduceSegment part = s;
  part.grads.clear();
  part.numel = last - first;
  part.shard = static_cast<char*>(s.shard) + first * itemsize(s.shard_dtype);
  for (int rank = 0; rank < size; ++rank) {
    const int64_t begin = rank * s.numel + first;
    for (ConstSpan span : part_of(s.grads, s.grad_dtype, begin, begin + part.numel)) {
      span.offset += rank * part.numel;
      part.grads.push_back(span);
    }
  }
  return part;
}

}  // namespace

std::vector<ConstSpan> part_of(const std::vector<ConstSpan>& spans, DType dtype, int64_t begin,
                               int64_t end) {
  std::vector<ConstSpan> part;
  for (const ConstSpan& span : spans) {
    const int64_t first = std::max(span.offset, begin);
    const int64_t last = std::min(span.offset + span.numel, end);
    if (span.data == nullptr || first >= last) continue;
    const auto* data =
        static_cast<const char*>(span.data) + (first - span.offset) * itemsize(dtype);
    part.push_back({data, last - first, first - begin});
  }
  return part;
}

std::vector<ReduceOp> split(const ReduceOp& op, int size, int64_t max_bytes) {
  if (SendLayout(op, size).nbytes <= max_bytes) return {op};
  constexpr int64_t kBlock = SendLayout::kAlign;  // elements; parts begin at whole cache lines
  std::vector<ReduceOp> parts;
  int64_t room = 0;  // bytes in the last part
  for (const ReduceSegment& s : op.segments) {
    const int64_t element = size * itemsize(s.wire_dtype);  // of every rank's piece
    for (int64_t first = 0, last; first < s.numel; first = last) {
      if (room < kBlock * element) {
        parts.push_back({op.tag, {}, {}, nullptr});
        room = std::max(max_bytes, kBlock * element);
      }
      last = std::min(s.numel, first + room / element / kBlock * kBlock);
      parts.back().segments.push_back(slice(s, size, first, last));
      room -= SendLayout::padded((last - first) * element);
    }
  }
  parts.back().used = op.used;
  return parts;
}

}  // namespace fsdpx
