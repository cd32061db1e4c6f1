// Where the segments of a reduction lie in a send buffer.
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
      nbytes += (size * s.numel * itemsize(s.wire_dtype) + kAlign - 1) / kAlign * kAlign;
    }
  }
};

}  // namespace fsdpx
