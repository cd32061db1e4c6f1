// From Python's integers and tuples to what the kernels take.
#pragma once

#include <cstdint>
#include <tuple>

#include "check.h"
#include "dtype.h"
#include "shard_passes.h"

namespace fsdpx {

inline DType to_dtype(int code) {
  check(code >= 0 && code <= static_cast<int>(DType::kBits128), "dtype code ", code,
        " does not exist");
  return static_cast<DType>(code);
}

inline void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

// param, exp_avg, exp_avg_sq, grad and its dtype, the copy or 0 and its dtype, numel
using AdamWTuple =
    std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int, uintptr_t, int, int64_t>;

inline AdamWShard to_adamw_shard(const AdamWTuple& tuple) {
  const auto& [param, exp_avg, exp_avg_sq, grad, grad_dtype, copy, copy_dtype, numel] = tuple;
  return {static_cast<float*>(pointer(param)),
          static_cast<float*>(pointer(exp_avg)),
          static_cast<float*>(pointer(exp_avg_sq)),
          pointer(grad),
          to_dtype(grad_dtype),
          pointer(copy),
          to_dtype(copy_dtype),
          numel};
}

}  // namespace fsdpx
