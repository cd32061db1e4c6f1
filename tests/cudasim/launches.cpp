// The passes of csrc/cuda behind a C interface, for tests that run them on a simulated device.
#include <cstdio>
#include <exception>

#include "cuda/kernels.h"

namespace {

// Runs `body`; returns the length of the message of the error that it threw, which is put into
// `message`.
template <typename Body>
int guarded(char* message, int size, const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    return std::snprintf(message, static_cast<size_t>(size), "%s", error.what());
  }
}

}  // namespace

extern "C" {

int sim_convert(const fsdpx::cuda::Piece* pieces, int64_t count, int from, int to, double scale,
                int accumulate, void* stream, char* message, int size) {
  return guarded(message, size, [&] {
    fsdpx::cuda::convert({pieces, static_cast<size_t>(count)}, static_cast<fsdpx::DType>(from),
                         static_cast<fsdpx::DType>(to), scale, accumulate != 0, stream);
  });
}

int sim_reduce(const void* const* srcs, int64_t count, int from, void* dst, int to, int64_t numel,
               double scale, int accumulate, void* stream, char* message, int size) {
  return guarded(message, size, [&] {
    fsdpx::cuda::reduce({srcs, static_cast<size_t>(count)}, static_cast<fsdpx::DType>(from), dst,
                        static_cast<fsdpx::DType>(to), numel, scale, accumulate != 0, stream);
  });
}

}  // extern "C"
