#include "nvlink_communicator.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "../check.h"
#include "kernels.h"

namespace fsdpx::cuda {
namespace {

// The flags and what a small all-reduce sends are one piece of driver memory.
constexpr int64_t kFlagBytes = 4096;
constexpr int64_t kSmallScratch = (int64_t{2} << 20) - kFlagBytes;
constexpr int64_t kScratch = int64_t{4} << 20;  // bytes that a large all-reduce sends at a time
static_assert(kMaxRanks * sizeof(uint64_t) <= kFlagBytes);
constexpr double kMaxSeconds = 1e9;

// Blocks of a pass over peers' memory. With 4 to 8 reads of 16 bytes under way for each of their
// threads, 32 blocks keep half a megabyte in flight: what 450 GB/s and a microsecond ask for.
int max_blocks() {
  constexpr int kDefault = 32;
  const char* const text = std::getenv("FSDPX_NVLINK_BLOCKS");
  if (text == nullptr || *text == '\0') return kDefault;
  int value = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  check(error == std::errc() && *end == '\0' && value >= 1, "FSDPX_NVLINK_BLOCKS is '", text,
        "': it must be the number of blocks that collectives may take, at least 1");
  return value;
}

}  // namespace

NvlinkCommunicator::NvlinkCommunicator(Surroundings surroundings,
                                       std::shared_ptr<DeviceMemory> memory, bool copies)
    : DeviceCommunicator(copies ? "nvlink-copy" : "nvlink", surroundings, memory),
      copies_(copies),
      max_blocks_(max_blocks()) {
  check<std::runtime_error>(size() <= kMaxRanks, "comm kind 'nvlink' is for at most ", kMaxRanks,
                            " ranks, not ", size());
  check(memory->maps_peers(), "comm kind 'nvlink' needs memory that peers map: 'ipc' or 'window'");
  const DeviceGuard guard(device());
  void* words = nullptr;
  check_cuda(cudaHostAlloc(&words, sizeof(Words), cudaHostAllocDefault), "cudaHostAlloc");
  std::memset(words, 0, sizeof(Words));
  words_ = {static_cast<Words*>(words), [](Words* p) { cudaFreeHost(p); }};
  flags_ = make_alike({"allocate", {"flags"}, {}, kFlagBytes + kSmallScratch, 0, 0});
  check_cuda(cudaMemset(flags_.data, 0, kFlagBytes), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  DeviceCommunicator::barrier({"connect"});  // before anyone stores there
  for (int peer = 0; peer < size(); ++peer) {
    barrier_.peers[peer] = reinterpret_cast<uint64_t*>(flags_.peers[static_cast<size_t>(peer)]);
  }
  barrier_.num_ranks = size();
  barrier_.rank = rank();
  barrier_.nanoseconds =
      static_cast<uint64_t>(std::clamp(surroundings.timeout, 0.0, kMaxSeconds) * 1e9);
  barrier_.error = &words_->error;
  barrier_.abort = &words_->abort;
}

// ---- Collectives

void NvlinkCommunicator::meet() { signal_and_wait(barrier_, ++epoch_, stream()); }

void NvlinkCommunicator::gather(const GatherOp& op, const Region& region) {
  if (copies_) cast_own(op, region);
  meet();  // every rank's slot is free
  if (copies_) {
    copy_to_all(op, region);
  } else {
    store_to_all(op, region);
  }
  meet();  // everything has arrived
}

void NvlinkCommunicator::store_to_all(const GatherOp& op, const Region& region) {
  std::array<void*, kMaxRanks> slots;
  for (int i = 0; i < size(); ++i) {  // each rank begins with another one
    const auto peer = static_cast<size_t>((rank() + i) % size());
    slots[static_cast<size_t>(i)] = region.peers[peer] + op.place.offset;
  }
  for (const GatherSegment& s : op.segments) {
    const int64_t own = s.dst_offset + rank() * s.numel * itemsize(s.dst_dtype);
    const GatherPiece piece{s.shard, s.numel, own};
    cuda::gather({&piece, 1}, {slots.data(), static_cast<size_t>(size())}, s.shard_dtype,
                 s.dst_dtype, stream(), max_blocks_);
  }
}

void NvlinkCommunicator::copy_to_all(const GatherOp& op, const Region& region) {
  for (int i = 1; i < size(); ++i) {
    const auto peer = static_cast<size_t>((rank() + i) % size());
    for (const GatherSegment& s : op.segments) {
      const int64_t nbytes = s.numel * itemsize(s.dst_dtype);
      const int64_t own = op.place.offset + s.dst_offset + rank() * nbytes;
      check_cuda(cudaMemcpyAsync(region.peers[peer] + own, region.data + own,
                                 static_cast<size_t>(nbytes), cudaMemcpyDeviceToDevice, stream()),
                 "cudaMemcpyAsync");
    }
  }
}

void NvlinkCommunicator::sum_into_shards(const ReduceOp& op, const SendLayout& layout,
                                         const Region& send) {
  meet();  // every rank's send buffer is full
  std::array<const void*, kMaxRanks> srcs;
  for (size_t i = 0; i < op.segments.size(); ++i) {
    const ReduceSegment& s = op.segments[i];
    const int64_t own = layout.offsets[i] + rank() * s.numel * itemsize(s.wire_dtype);
    for (size_t peer = 0; peer < send.peers.size(); ++peer) srcs[peer] = send.peers[peer] + own;
    reduce({srcs.data(), send.peers.size()}, s.wire_dtype, s.shard, s.shard_dtype, s.numel, s.scale,
           s.accumulate, stream(), max_blocks_);
  }
  meet();  // every rank has read
}

// Large ones go in parts: while one is read, the next is copied into the other half.
void NvlinkCommunicator::all_reduce_in_place(void* data, DType dtype, int64_t numel) {
  const bool small = numel * itemsize(dtype) <= kSmallScratch;
  if (!small && scratch_.data == nullptr)
    scratch_ = make_alike({"allocate", {"all_reduce"}, {}, 2 * kScratch, 0, 0});
  const Region& scratch = small ? flags_ : scratch_;
  const int64_t first = small ? kFlagBytes : 0;
  const int64_t count = (small ? kSmallScratch : kScratch) / itemsize(dtype);
  std::array<const void*, kMaxRanks> srcs;
  int64_t half = 0;
  for (int64_t begin = 0; begin < numel; begin += count, half = kScratch - half) {
    const int64_t part = std::min(count, numel - begin);
    char* const values = static_cast<char*>(data) + begin * itemsize(dtype);
    check_cuda(cudaMemcpyAsync(scratch.data + first + half, values,
                               static_cast<size_t>(part * itemsize(dtype)),
                               cudaMemcpyDeviceToDevice, stream()),
               "cudaMemcpyAsync");
    meet();  // all have copied; and have read what lies in the other half
    for (size_t peer = 0; peer < scratch.peers.size(); ++peer) {
      srcs[peer] = scratch.peers[peer] + first + half;
    }
    reduce({srcs.data(), scratch.peers.size()}, dtype, values, dtype, part, 1.0, false, stream(),
           max_blocks_);
  }
  meet();  // all have read the last part
}

// ---- Failure

void NvlinkCommunicator::abort() {
  __atomic_store_n(&words_->abort, uint64_t{1}, __ATOMIC_RELEASE);
}

std::string NvlinkCommunicator::problem() {
  if (__atomic_load_n(&words_->error.failed, __ATOMIC_ACQUIRE) == 0) return {};
  const BarrierError& error = words_->error;
  return detail::concat("rank ", rank(), " waited on its GPU for rank ", error.rank,
                        ", which was at epoch ", error.counter, " instead of ", error.target);
}

void NvlinkCommunicator::destroy() {
  flags_ = {};
  scratch_ = {};
}

}  // namespace fsdpx::cuda
