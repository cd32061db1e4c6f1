// The passes of csrc/cuda behind a C interface, for tests that run them on a simulated device.
#include <cstdio>
#include <exception>

#include "cuda/barrier.h"
#include "cuda/kernels.h"
#include "cuda/shard_passes.h"

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

int sim_gather(const fsdpx::cuda::GatherPiece* pieces, int64_t count, void* const* peers,
               int64_t num_peers, int from, int to, int max_blocks, char* message, int size) {
  return guarded(message, size, [&] {
    fsdpx::cuda::gather({pieces, static_cast<size_t>(count)},
                        {peers, static_cast<size_t>(num_peers)}, static_cast<fsdpx::DType>(from),
                        static_cast<fsdpx::DType>(to), nullptr, max_blocks);
  });
}

int sim_reduce(const void* const* srcs, int64_t count, int from, void* dst, int to, int64_t numel,
               double scale, int accumulate, int max_blocks, char* message, int size) {
  return guarded(message, size, [&] {
    fsdpx::cuda::reduce({srcs, static_cast<size_t>(count)}, static_cast<fsdpx::DType>(from), dst,
                        static_cast<fsdpx::DType>(to), numel, scale, accumulate != 0, nullptr,
                        max_blocks);
  });
}

int sim_norm(const void* src, int dtype, int64_t numel, void* workspace, void* out, char* message,
             int size) {
  return guarded(message, size, [&] {
    fsdpx::cuda::norm_and_check(src, static_cast<fsdpx::DType>(dtype), numel, workspace, out,
                                nullptr);
  });
}

int sim_adamw(void* const* data, int grad_dtype, int copy_dtype, int64_t numel,
              const fsdpx::AdamWOptions* options, char* message, int size) {
  return guarded(message, size, [&] {
    const fsdpx::AdamWShard shard{
        static_cast<float*>(data[0]),          static_cast<float*>(data[1]),
        static_cast<float*>(data[2]),          data[3],
        static_cast<fsdpx::DType>(grad_dtype), data[4],
        static_cast<fsdpx::DType>(copy_dtype), numel};
    fsdpx::cuda::adamw(shard, *options, nullptr);
  });
}

int sim_barrier(void* const* peers, int num_ranks, int rank, uint64_t nanoseconds, void* error,
                const void* abort, uint64_t epoch, int waits, void* stream, char* message,
                int size) {
  return guarded(message, size, [&] {
    fsdpx::cuda::Barrier barrier{};
    for (int i = 0; i < num_ranks; ++i) barrier.peers[i] = static_cast<uint64_t*>(peers[i]);
    barrier.num_ranks = num_ranks;
    barrier.rank = rank;
    barrier.nanoseconds = nanoseconds;
    barrier.error = static_cast<fsdpx::cuda::BarrierError*>(error);
    barrier.abort = static_cast<const uint64_t*>(abort);
    if (waits != 0) {
      fsdpx::cuda::signal_and_wait(barrier, epoch, stream);
    } else {
      fsdpx::cuda::signal(barrier, epoch, stream);
    }
  });
}

}  // extern "C"
