#include "shm_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "check.h"
#include "comm_layout.h"
#include "shm_exchange.h"

namespace fsdpx {
namespace {

// memcpy for pieces that may be empty, whose addresses may then be null.
void copy_bytes(void* dst, const void* src, int64_t nbytes) {
  if (nbytes > 0) std::memcpy(dst, src, nbytes);
}

constexpr int64_t kControlBytes = sizeof(ControlBlock);

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Whether packing would only copy flat elements [begin, end), and there is no gap in them.
bool reads_in_place(const ReduceSegment& s, int64_t begin, int64_t end) {
  if (s.grad_dtype != s.wire_dtype) return false;
  int64_t covered = 0;
  for (const ConstSpan& part : part_of(s.grads, s.grad_dtype, begin, end)) covered += part.numel;
  return covered == end - begin;
}

char* bytes_of(const Mapping& mapping) { return static_cast<char*>(mapping.data()); }

std::shared_ptr<Exchange> make_exchange(const std::string& way, std::string* address) {
  if (way == "sockets") {
    auto exchange = std::make_shared<SocketExchange>();
    *address = exchange->address();
    return exchange;
  }
  if (way == "names") {
    auto exchange = std::make_shared<NamedExchange>();
    *address = exchange->address();
    return exchange;
  }
  check(way == "private", "'", way, "' is no way to share memory: sockets, names or private");
  return std::make_shared<PrivateExchange>();
}

}  // namespace

ShmBootstrap::ShmBootstrap(const std::string& way) : exchange_(make_exchange(way, &address_)) {
  control_ = exchange_->make(kControlBytes);
}

std::shared_ptr<Communicator> ShmBootstrap::connect(int rank,
                                                    const std::vector<std::string>& addresses,
                                                    const ShmOptions& options) {
  const int size = static_cast<int>(addresses.size());
  check(rank >= 0 && rank < size, "rank ", rank, " of ", size);
  check(control_ != nullptr, "a bootstrap connects once");
  if (auto* sockets = dynamic_cast<SocketExchange*>(exchange_.get())) {
    sockets->connect(rank, addresses, deadline_after(options.connect_timeout));
  } else if (auto* names = dynamic_cast<NamedExchange*>(exchange_.get())) {
    names->connect(rank, addresses);
  } else {
    check(size == 1, "private memory is for one rank, not ", size);
  }
  return std::make_shared<ShmCommunicator>(rank, size, std::move(exchange_), std::move(control_),
                                           options);
}

ShmCommunicator::ShmCommunicator(int rank, int size, std::shared_ptr<Exchange> exchange,
                                 std::shared_ptr<Mapping> control, const ShmOptions& options)
    : rank_(rank), size_(size), pid_(getpid()), options_(options), exchange_(std::move(exchange)) {
  const Deadline deadline = deadline_after(options.connect_timeout);
  exchange_->offer(*control, deadline);
  std::vector<std::shared_ptr<Mapping>> blocks(size);
  for (int peer = 0; peer < size; ++peer)
    blocks[peer] = peer == rank ? control : exchange_->take(peer, kControlBytes, deadline);
  board_ = std::make_unique<Board>(rank, std::move(blocks), exchange_, options.connect_timeout);
  board_->begin({"connect", {}, {}, size, 0, uint64_t(options.max_send_bytes)});
  exchange_->finish(*control);
  board_->end();
  board_->set_timeout(options.timeout);
}

ShmCommunicator::~ShmCommunicator() {
  if (board_ != nullptr) close();
}

template <typename Body>
void ShmCommunicator::collective(Body body) {
  check<std::runtime_error>(getpid() == pid_, "this communicator belongs to process ", pid_,
                            ". A forked child can't run collectives; start workers with 'spawn' or "
                            "'forkserver', or create the process group in the child.");
  std::lock_guard lock(mutex_);
  board_->check_usable();
  try {
    body();
  } catch (const std::exception& error) {
    // Without effect if the failure is known already.
    board_->post_failure(BoardState::kFailed,
                         detail::concat("fsdpx: rank ", rank_, " failed: ", detail::bare(error)));
    throw;
  }
}

std::shared_ptr<const ShmCommunicator::Region> ShmCommunicator::make_region(
    const Announcement& announcement) {
  const int64_t nbytes = round_up(std::max<int64_t>(announcement.nbytes, 1), sysconf(_SC_PAGESIZE));
  auto own = exchange_->make(nbytes);
  board_->begin(announcement);
  const Deadline deadline = board_->deadline();
  exchange_->offer(*own, deadline);
  auto region = std::make_shared<Region>(size_);
  for (int peer = 0; peer < size_; ++peer)
    (*region)[peer] = peer == rank_ ? own : exchange_->take(peer, nbytes, deadline);
  board_->arrive();
  exchange_->finish(*own);
  board_->end();
  return region;
}

int64_t ShmCommunicator::allocate(int64_t nbytes) {
  check(nbytes >= 0, "allocate of ", nbytes, " bytes");
  int64_t number = 0;
  collective([&] {
    number = ++num_regions_;
    auto region =
        make_region({"allocate", {detail::concat("region ", number)}, {number, 0}, nbytes, 0, 0});
    std::lock_guard lock(regions_mutex_);
    regions_[number] = std::move(region);
  });
  return number;
}

std::shared_ptr<const ShmCommunicator::Region> ShmCommunicator::find_region(int64_t number) {
  std::lock_guard lock(regions_mutex_);
  const auto found = regions_.find(number);
  check(found != regions_.end(), "there is no region ", number, " (released?)");
  return found->second;
}

void* ShmCommunicator::region_data(int64_t region) { return (*find_region(region))[rank_]->data(); }

std::vector<std::shared_ptr<void>> ShmCommunicator::parts(int64_t region) {
  std::vector<std::shared_ptr<void>> parts;
  for (const std::shared_ptr<Mapping>& part : *find_region(region))
    parts.emplace_back(part, part->data());
  return parts;
}

void ShmCommunicator::release(int64_t region) {
  std::shared_ptr<const Region> dropped;  // unmapped without the lock
  std::lock_guard lock(regions_mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end()) return;
  dropped = std::move(found->second);
  regions_.erase(found);
}

void ShmCommunicator::check_gather(const GatherOp& op, int64_t region_bytes) const {
  for (const GatherSegment& s : op.segments) {
    const int64_t begin = op.place.offset + s.dst_offset;
    const int64_t nbytes = s.numel * size_ * itemsize(s.dst_dtype);
    check(
        s.numel >= 0 && op.place.offset >= 0 && s.dst_offset >= 0 && nbytes <= region_bytes - begin,
        "unit '", op.tag.unit, "': ", nbytes, " bytes at ", begin, " of a region of ",
        region_bytes);
  }
}

void ShmCommunicator::all_gather(const GatherOp& op) {
  collective([&] {
    const auto region = find_region(op.place.region);
    check_gather(op, (*region)[rank_]->nbytes());
    int64_t nbytes = 0;
    for (const GatherSegment& s : op.segments) nbytes += s.numel * size_ * itemsize(s.dst_dtype);
    board_->begin({"all_gather", op.tag, op.place, nbytes, 0, details_of(op)});
    scatter_shard(op, *region);
    board_->arrive();
    board_->end();
  });
}

// Casts this rank's shard into every rank's place: its own, then the others', each rank starting
// with another.
void ShmCommunicator::scatter_shard(const GatherOp& op, const Region& region) {
  std::vector<void*> targets(size_);
  for (const GatherSegment& s : op.segments) {
    const int64_t offset = op.place.offset + s.dst_offset + rank_ * s.numel * itemsize(s.dst_dtype);
    for (int i = 0; i < size_; ++i) targets[i] = bytes_of(*region[(rank_ + i) % size_]) + offset;
    cast_to_all(s.shard, s.shard_dtype, targets, s.dst_dtype, s.numel);
  }
}

// [Note: Send buffers] There are two, used in turn. A rank that packs into a buffer has finished
// the collective that used the other one; to get that far all ranks had to announce that
// collective, and they had read this buffer before. So no further wait is needed. What is larger
// than a buffer may be goes in parts, each announced like a collective of its own: memory stays
// small, and what peers read is still in the caches.
const ShmCommunicator::Region& ShmCommunicator::next_send_buffer(const Tag& tag, int64_t nbytes) {
  auto& buffer = send_buffers_[num_sends_++ & 1];
  if (buffer == nullptr || nbytes > (*buffer)[rank_]->nbytes()) {
    check(nbytes <= options_.max_send_bytes, "unit '", tag.unit, "' sends ", nbytes,
          " bytes at once, more than max_bytes=", options_.max_send_bytes);
    buffer.reset();  // first: both at once may not fit
    buffer = make_region({"allocate a send buffer", tag, {}, nbytes, 0, 0});
  }
  return *buffer;
}

void ShmCommunicator::reduce_scatter(ReduceOp& op) {
  collective([&] {
    const auto num_used = static_cast<int64_t>(op.used.size());
    const int64_t nbytes = SendLayout(op, size_).nbytes + num_used;
    const Announcement whole = {"reduce_scatter", op.tag, {}, nbytes, num_used, details_of(op)};
    auto parts = split(op, size_, options_.max_send_bytes - num_used);
    for (ReduceOp& part : parts) reduce_part(part, whole);
    op.used = std::move(parts.back().used);
  });
}

void ShmCommunicator::reduce_part(ReduceOp& op, const Announcement& announcement) {
  const SendLayout layout(op, size_);
  // The used flags follow the segments.
  const Region& buffer =
      next_send_buffer(op.tag, layout.nbytes + static_cast<int64_t>(op.used.size()));
  char* own = bytes_of(*buffer[rank_]);
  for (size_t i = 0; i < op.segments.size(); ++i)
    pack_for_peers(op.segments[i], own + layout.offsets[i]);
  std::copy(op.used.begin(), op.used.end(), own + layout.nbytes);
  board_->begin(announcement);
  sum_pieces(op, buffer);
  board_->end();
}

// Packs what peers will read and, unless it can be read where it is, this rank's own piece.
void ShmCommunicator::pack_for_peers(const ReduceSegment& s, char* flat) {
  const int64_t begin = rank_ * s.numel, end = begin + s.numel, all = size_ * s.numel;
  const auto pack_range = [&](int64_t first, int64_t last) {
    pack(part_of(s.grads, s.grad_dtype, first, last), s.grad_dtype,
         flat + first * itemsize(s.wire_dtype), s.wire_dtype, last - first);
  };
  if (reads_in_place(s, begin, end)) {
    pack_range(0, begin);
    pack_range(end, all);
  } else {
    pack_range(0, all);
  }
}

void ShmCommunicator::sum_pieces(ReduceOp& op, const Region& buffer) {
  const SendLayout layout(op, size_);
  std::vector<const void*> pieces(size_);
  for (size_t i = 0; i < op.segments.size(); ++i) {
    const ReduceSegment& s = op.segments[i];
    const int64_t begin = rank_ * s.numel, end = begin + s.numel;
    // Elements [first, last) of this rank's piece; its own gradients lie at `own`, or in its
    // buffer.
    const auto sum_range = [&](int64_t first, int64_t last, const void* own) {
      const int64_t offset = layout.offsets[i] + (begin + first) * itemsize(s.wire_dtype);
      for (int peer = 0; peer < size_; ++peer) pieces[peer] = bytes_of(*buffer[peer]) + offset;
      if (own != nullptr) pieces[rank_] = own;
      reduce(pieces, s.wire_dtype, static_cast<char*>(s.shard) + first * itemsize(s.shard_dtype),
             s.shard_dtype, last - first, s.scale, s.accumulate);
    };
    if (reads_in_place(s, begin, end)) {
      for (const ConstSpan& part : part_of(s.grads, s.grad_dtype, begin, end))
        sum_range(part.offset, part.offset + part.numel, part.data);
    } else {
      sum_range(0, s.numel, nullptr);
    }
  }
  merge_flags(buffer, layout.nbytes, op.used);
}

void ShmCommunicator::merge_flags(const Region& buffer, int64_t offset,
                                  std::vector<uint8_t>& flags) {
  for (int peer = 0; peer < size_; ++peer) {
    const char* theirs = bytes_of(*buffer[peer]) + offset;
    for (size_t i = 0; i < flags.size(); ++i) flags[i] |= static_cast<uint8_t>(theirs[i]);
  }
}

void ShmCommunicator::all_reduce(const Tag& tag, void* data, DType dtype, int64_t numel,
                                 double scale) {
  collective([&] {
    Hasher hasher;
    hasher.add(uint64_t(dtype));
    const Announcement whole = {"all_reduce", tag, {}, numel * itemsize(dtype), 0, hasher.value()};
    const int64_t most = std::max<int64_t>(options_.max_send_bytes / itemsize(dtype), 1);
    int64_t first = 0;
    do {
      const int64_t count = std::min(most, numel - first);
      all_reduce_part(whole, static_cast<char*>(data) + first * itemsize(dtype), dtype, count,
                      scale);
      first += count;
    } while (first < numel);
  });
}

void ShmCommunicator::all_reduce_part(const Announcement& announcement, char* data, DType dtype,
                                      int64_t numel, double scale) {
  const int64_t nbytes = numel * itemsize(dtype);
  const Region& buffer = next_send_buffer(announcement.tag, nbytes);
  char* const own = bytes_of(*buffer[rank_]);
  copy_bytes(own, data, nbytes);
  board_->begin(announcement);
  // Rank r sums the rth piece, and then everyone copies the sums.
  const auto begin_of = [&](int rank) { return numel * rank / size_ * itemsize(dtype); };
  const int64_t begin = begin_of(rank_), end = begin_of(rank_ + 1);
  std::vector<const void*> pieces(size_);
  for (int peer = 0; peer < size_; ++peer) pieces[peer] = bytes_of(*buffer[peer]) + begin;
  reduce(pieces, dtype, data + begin, dtype, (end - begin) / itemsize(dtype), scale);
  copy_bytes(own + begin, data + begin, end - begin);  // only this rank reads that piece before
  board_->arrive();
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    const int64_t first = begin_of(peer);
    copy_bytes(data + first, bytes_of(*buffer[peer]) + first, begin_of(peer + 1) - first);
  }
  board_->end();
}

void ShmCommunicator::barrier(const Tag& tag) {
  collective([&] {
    board_->begin({"barrier", tag, {}, 0, 0, 0});
    board_->end();
  });
}

void ShmCommunicator::agree(const Announcement& announcement, std::vector<uint8_t>& flags) {
  collective([&] {
    if (flags.empty()) {
      board_->begin(announcement);
      board_->end();
      return;
    }
    const Region& buffer = next_send_buffer(announcement.tag, static_cast<int64_t>(flags.size()));
    std::copy(flags.begin(), flags.end(), bytes_of(*buffer[rank_]));
    board_->begin(announcement);
    merge_flags(buffer, 0, flags);
    board_->end();
  });
}

void ShmCommunicator::close() {
  if (getpid() != pid_) return;  // a forked child only has copies
  board_->leave();
  // A collective that runs on another thread sees that, and what it uses stays until this object
  // goes. Own regions stay mapped as well: tensors may lie in them.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  for (auto& buffer : send_buffers_) buffer.reset();
  exchange_->close();
}

}  // namespace fsdpx
