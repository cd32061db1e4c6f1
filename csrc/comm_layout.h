// Where the segments of a reduction lie in a send buffer, and how a large one goes through small
// buffers in parts.
#pragma once

#include <cstdint>
#include <vector>

#include "communicator.h"

namespace fsdpx {

struct SendLayout {
  static constexpr int64_t kAlign = 128;

  std::vector<int64_t> offsets;  // bytes, by segment
  int64_t nbytes = 0;            // of all segments

  SendLayout(const ReduceOp& op, int size) {
    for (const ReduceSegment& s : op.segments) {
      offsets.push_back(nbytes);
      nbytes += padded(size * s.numel * itemsize(s.wire_dtype));
    }
  }

  static int64_t padded(int64_t nbytes) { return (nbytes + kAlign - 1) / kAlign * kAlign; }
};

// The part of `spans` that covers flat elements [begin, end), as spans of that range.
std::vector<ConstSpan> part_of(const std::vector<ConstSpan>& spans, DType dtype, int64_t begin,
                               int64_t end);

// The reduction as several, of at most `max_bytes` each unless a few elements of every rank's piece
// take more. The flags travel with the last.
std::vector<ReduceOp> split(const ReduceOp& op, int size, int64_t max_bytes);

}  // namespace fsdpx
