#include "exchange_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "check.h"

namespace fsdpx {
namespace {

constexpr int64_t kPage = 4096;

}  // namespace

char* ExchangeCommunicator::Buffer::resize(int64_t nbytes) {
  if (nbytes > capacity_) {
    data_.reset();
    data_.reset(new char[nbytes]);
    capacity_ = nbytes;
  }
  return data_.get();
}

ExchangeCommunicator::ExchangeCommunicator(std::string kind, int rank, int size,
                                           ByteCollectives calls)
    : kind_(std::move(kind)), rank_(rank), size_(size), pid_(getpid()), calls_(std::move(calls)) {}

template <typename Body>
void ExchangeCommunicator::collective(const Announcement& announcement, Body body) {
  check<std::runtime_error>(getpid() == pid_, "this communicator belongs to process ", pid_,
                            ". A forked child can't run collectives; start workers with 'spawn' or "
                            "'forkserver', or create the process group in the child.");
  std::lock_guard lock(mutex_);
  check<std::runtime_error>(!closed_.load(std::memory_order_relaxed), "the communicator is closed");
  if (broken_) std::rethrow_exception(broken_);
  ++sequence_;
  try {
    try {
      compare(announcement);
      body();
      previous_ = announcement;
    } catch (const DesyncError&) {
      throw;
    } catch (const CommTimeout& error) {
      throw CommTimeout(explain(announcement, error));
    } catch (const PeerFailure& error) {
      throw DesyncError(explain(announcement, error));
    } catch (const std::exception& error) {
      throw std::runtime_error(detail::concat("fsdpx: rank ", rank_, " in collective ", sequence_,
                                              ", ", describe(announcement), ": ",
                                              detail::bare(error)));
    }
  } catch (...) {
    broken_ = std::current_exception();
    throw;
  }
}

std::string ExchangeCommunicator::explain(const Announcement& announcement,
                                          const std::exception& error) {
  calls_.tell(sequence_,
              detail::concat("waits in ", sequence_, " (", describe_briefly(announcement), ")"));
  return detail::concat("fsdpx: rank ", rank_, " in collective ", sequence_, ", ",
                        describe(announcement), ": ", error.what(), ". ", calls_.ask(sequence_),
                        last_alike(previous_), kWayOn);
}

void ExchangeCommunicator::leave_word(const std::string& text) {
  std::lock_guard lock(mutex_);
  if (broken_ || closed_.load(std::memory_order_relaxed)) return;
  const std::string last =
      sequence_ == 0 ? "" : detail::concat(" (", describe_briefly(previous_), ")");
  calls_.tell(sequence_, detail::concat("has finished ", sequence_, last, " and then ", text));
}

void ExchangeCommunicator::compare(const Announcement& announcement) {
  const AnnouncementWords mine = encode(announcement);
  std::vector<AnnouncementWords> all(size_);
  calls_.all_gather(mine.data(), all.data(), sizeof(mine));
  for (int peer = 0; peer < size_; ++peer)
    if (all[peer][0] != mine[0])
      throw DesyncError(
          desync_message(sequence_, rank_, announcement, peer, decode(all[peer]), previous_));
}

int64_t ExchangeCommunicator::allocate(int64_t nbytes) {
  check(nbytes >= 0, "allocate of ", nbytes, " bytes");
  const int64_t number = ++num_regions_;
  const Tag tag = {detail::concat("region ", number)};
  collective({"allocate", tag, {number, 0}, nbytes, 0, 0}, [&] {
    std::shared_ptr<char[]> memory(new char[nbytes + kPage]());
    const auto address = reinterpret_cast<uintptr_t>(memory.get());
    char* data = memory.get() + (kPage - address % kPage) % kPage;
    std::lock_guard lock(regions_mutex_);
    regions_[number] = {std::move(memory), data, nbytes};
  });
  return number;
}

ExchangeCommunicator::Region ExchangeCommunicator::find_region(int64_t number) {
  std::lock_guard lock(regions_mutex_);
  const auto found = regions_.find(number);
  check(found != regions_.end(), "there is no region ", number, " (released?)");
  return found->second;
}

void* ExchangeCommunicator::region_data(int64_t region) { return find_region(region).data; }

void ExchangeCommunicator::release(int64_t region) {
  std::lock_guard lock(regions_mutex_);
  regions_.erase(region);
}

void ExchangeCommunicator::all_gather(const GatherOp& op) {
  int64_t nbytes = 0;
  for (const GatherSegment& s : op.segments) nbytes += s.numel * size_ * itemsize(s.dst_dtype);
  collective({"all_gather", op.tag, op.place, nbytes, 0, details_of(op)}, [&] {
    const Region region = find_region(op.place.region);
    char* const place = region.data + op.place.offset;
    if (op.segments.size() == 1) {
      gather_segment(op.segments[0], place);
      return;
    }
    // All segments travel together: one message per rank is worth a copy.
    char* const send = send_.resize(nbytes / size_);
    char* const receive = receive_.resize(nbytes);
    int64_t offset = 0;
    for (const GatherSegment& s : op.segments) {
      cast(s.shard, s.shard_dtype, send + offset, s.dst_dtype, s.numel);
      offset += s.numel * itemsize(s.dst_dtype);
    }
    calls_.all_gather(send, receive, nbytes / size_);
    offset = 0;
    for (const GatherSegment& s : op.segments) {
      const int64_t piece = s.numel * itemsize(s.dst_dtype);
      for (int peer = 0; peer < size_; ++peer)
        std::memcpy(place + s.dst_offset + peer * piece, receive + peer * nbytes / size_ + offset,
                    piece);
      offset += piece;
    }
  });
}

void ExchangeCommunicator::gather_segment(const GatherSegment& s, char* place) {
  const int64_t nbytes = s.numel * itemsize(s.dst_dtype);
  char* const all = place + s.dst_offset;
  char* const own = all + rank_ * nbytes;
  cast(s.shard, s.shard_dtype, own, s.dst_dtype, s.numel);
  calls_.all_gather(own, all, nbytes);
}

void ExchangeCommunicator::reduce_scatter(ReduceOp& op) {
  int64_t nbytes = 0;
  for (const ReduceSegment& s : op.segments) nbytes += s.numel * size_ * itemsize(s.wire_dtype);
  const auto num_used = static_cast<int64_t>(op.used.size());
  collective({"reduce_scatter", op.tag, {}, nbytes, num_used, details_of(op)}, [&] {
    for (const ReduceSegment& s : op.segments) all_to_all_sum(s);
    merge_flags(op.used);
  });
}

void ExchangeCommunicator::all_to_all_sum(const ReduceSegment& s) {
  const int64_t piece = s.numel * itemsize(s.wire_dtype);
  char* const send = send_.resize(piece * size_);
  char* const receive = receive_.resize(piece * size_);
  pack(s.grads, s.grad_dtype, send, s.wire_dtype, size_ * s.numel);
  calls_.all_to_all(send, receive, piece);
  std::vector<const void*> pieces(size_);
  for (int peer = 0; peer < size_; ++peer) pieces[peer] = receive + peer * piece;
  reduce(pieces, s.wire_dtype, s.shard, s.shard_dtype, s.numel, s.scale, s.accumulate);
}

void ExchangeCommunicator::merge_flags(std::vector<uint8_t>& used) {
  if (used.empty()) return;
  std::vector<uint8_t> all(used.size() * size_);
  calls_.all_gather(used.data(), all.data(), static_cast<int64_t>(used.size()));
  for (size_t i = 0; i < all.size(); ++i) used[i % used.size()] |= all[i];
}

void ExchangeCommunicator::all_reduce(const Tag& tag, void* data, DType dtype, int64_t numel,
                                      double scale) {
  const int64_t size_bytes = itemsize(dtype);
  Hasher hasher;
  hasher.add(uint64_t(dtype));
  collective({"all_reduce", tag, {}, numel * size_bytes, 0, hasher.value()}, [&] {
    // Equal pieces, as the primitives want them: rank r sums the rth, then everyone gets all sums.
    const int64_t piece_numel = (numel + size_ - 1) / size_;
    const int64_t piece = piece_numel * size_bytes;
    char* const send = send_.resize(piece * size_);
    char* const receive = receive_.resize(piece * size_);
    std::memcpy(send, data, numel * size_bytes);
    std::memset(send + numel * size_bytes, 0, piece * size_ - numel * size_bytes);
    calls_.all_to_all(send, receive, piece);
    std::vector<const void*> pieces(size_);
    for (int peer = 0; peer < size_; ++peer) pieces[peer] = receive + peer * piece;
    reduce(pieces, dtype, send, dtype, piece_numel, scale);
    calls_.all_gather(send, receive, piece);
    std::memcpy(data, receive, numel * size_bytes);
  });
}

void ExchangeCommunicator::barrier(const Tag& tag) {
  collective({"barrier", tag, {}, 0, 0, 0}, [] {});
}

void ExchangeCommunicator::agree(const Announcement& announcement, std::vector<uint8_t>& flags) {
  collective(announcement, [&] { merge_flags(flags); });
}

void ExchangeCommunicator::close() { closed_.store(true, std::memory_order_relaxed); }

}  // namespace fsdpx
