#include "device_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "../check.h"
#include "kernels.h"

namespace fsdpx::cuda {
namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr double kSecondsToAbort = 1.0;

int64_t gathered_bytes(const GatherOp& op, int size) {
  int64_t nbytes = 0;
  for (const GatherSegment& s : op.segments) nbytes += s.numel * size * itemsize(s.dst_dtype);
  return nbytes;
}

// `srcs` as pieces of the flat buffer; what they leave out are pieces of zeros.
std::vector<Piece> pieces_of(std::span<const ConstSpan> srcs, DType from, char* flat, DType to,
                             int64_t flat_numel) {
  std::vector<Piece> pieces;
  int64_t position = 0;
  const auto zeros_up_to = [&](int64_t end) {
    if (end > position) pieces.push_back({nullptr, flat + position * itemsize(to), end - position});
  };
  for (const ConstSpan& span : srcs) {
    check(span.offset >= position && span.numel <= flat_numel - span.offset, "a span of ",
          span.numel, " ", name(from), " at ", span.offset, " does not fit a flat buffer of ",
          flat_numel);
    zeros_up_to(span.offset);
    pieces.push_back({span.data, flat + span.offset * itemsize(to), span.numel});
    position = span.offset + span.numel;
  }
  zeros_up_to(flat_numel);
  return pieces;
}

}  // namespace

DeviceCommunicator::DeviceCommunicator(std::string kind, Surroundings surroundings,
                                       std::shared_ptr<DeviceMemory> memory)
    : kind_(std::move(kind)),
      surroundings_(std::move(surroundings)),
      memory_(std::move(memory)),
      pid_(getpid()) {}

DeviceCommunicator::~DeviceCommunicator() = default;

// ---- Agreement and failure

void DeviceCommunicator::check_usable() const {
  check<std::runtime_error>(!closed_.load(std::memory_order_relaxed), "the communicator is closed");
  std::lock_guard lock(failure_mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void DeviceCommunicator::run(const std::function<void()>& passes) {
  try {
    const Watchdog::Call call(watchdog(), announced_);
    passes();
  } catch (...) {
    check_usable();
    throw;
  }
}

void DeviceCommunicator::in_group(const std::function<void()>& calls) {
  begin_group();
  try {
    calls();
  } catch (...) {
    try {
      end_group();
    } catch (const std::exception&) {
      // the first error is the one to tell
    }
    throw;
  }
  end_group();
}

bool DeviceCommunicator::is_broken() const {
  std::lock_guard lock(failure_mutex_);
  return failure_ != nullptr;
}

void DeviceCommunicator::fail(std::exception_ptr error) noexcept {
  {
    std::lock_guard lock(failure_mutex_);
    if (failure_) return;
    failure_ = std::move(error);
  }
  abort();
}

// See [Note: Control plane].
std::shared_ptr<const LateFlags> DeviceCommunicator::announce(const Announcement& announcement,
                                                              std::vector<uint8_t> flags) {
  check_usable();
  announced_ =
      detail::concat("rank ", rank(), ": collective ", ++sequence_, ", ", describe(announcement));
  auto late = std::make_shared<LateFlags>();
  late->flags = std::move(flags);
  late->known = surroundings_.control_stream->enqueue(
      [weak = weak_from_this(), control = surroundings_.control, announcement,
       filled = std::weak_ptr<LateFlags>(late), flags = late->flags]() mutable {
        try {
          control->agree(announcement, flags);
        } catch (...) {
          if (const auto self = weak.lock()) self->fail(std::current_exception());
          throw;
        }
        if (const auto target = filled.lock()) target->flags = std::move(flags);
      });
  return late;
}

std::vector<uint8_t> DeviceCommunicator::agree_now(const Announcement& announcement,
                                                   std::vector<uint8_t> flags) {
  const auto late = announce(announcement, std::move(flags));
  late->known->wait(kForever);  // control has a limit of its own
  return late->flags;
}

void DeviceCommunicator::agree(const Announcement& announcement, std::vector<uint8_t>& flags) {
  flags = agree_now(announcement, std::move(flags));
}

Watchdog& DeviceCommunicator::watchdog() {
  if (watchdog_ == nullptr)
    watchdog_ = std::make_unique<Watchdog>(
        device(), surroundings_.timeout,
        [weak = weak_from_this()] {
          const auto self = weak.lock();
          return self == nullptr ? std::string() : self->problem();
        },
        [weak = weak_from_this()](const std::string& message) {
          if (const auto self = weak.lock())
            self->fail(std::make_exception_ptr(CommTimeout("fsdpx: " + message)));
        });
  return *watchdog_;
}

void DeviceCommunicator::note_issued(std::shared_ptr<Event> event) {
  watchdog().watch(event, announced_ + ", on the GPU");
  last_ = std::move(event);
}

void DeviceCommunicator::close() {
  if (getpid() != pid_) return;  // a forked child has neither CUDA nor the watchdog's thread
  if (closed_.exchange(true)) return;
  if (watchdog_ != nullptr) watchdog_->stop();
  if (last_ != nullptr && !last_->query())
    fail(std::make_exception_ptr(
        std::runtime_error("fsdpx: the communicator was closed while a collective of it ran")));
  // What runs has been told to end. If it does not, it may use everything, also on other ranks.
  if (last_ != nullptr && !last_->ended_within(kSecondsToAbort)) return;
  unmap_peers();
  destroy();
  memory_->close();
}

// This rank's own parts stay: tensors may lie in them.
void DeviceCommunicator::unmap_peers() {
  for (SendBuffer& buffer : send_buffers_) buffer = {};
  std::lock_guard lock(regions_mutex_);
  for (auto& [number, region] : regions_) region.unmap_peers();
}

// ---- Memory

Region DeviceCommunicator::make_alike(const Announcement& announcement) {
  check_usable();
  Region region;
  std::string problem;
  std::vector<uint8_t> failed(size());
  try {
    region = memory_->make(std::max<int64_t>(announcement.nbytes, 1));
  } catch (const std::exception& error) {
    problem = error.what();
    failed[rank()] = 1;
  }
  failed = agree_now(announcement, std::move(failed));
  for (int peer = 0; peer < size(); ++peer)
    check<std::runtime_error>(!failed[peer], "rank ", peer, " could not allocate ",
                              announcement.nbytes, " bytes of GPU memory for ",
                              announcement.tag.unit, peer == rank() ? " (" + problem + ")" : "");
  free_parked();  // all have come here, so they have unmapped what this region stands for
  memory_->share(region);
  return region;
}

int64_t DeviceCommunicator::allocate(int64_t nbytes) {
  check(nbytes >= 0, "allocate of ", nbytes, " bytes");
  const int64_t number = ++num_regions_;
  Region region =
      make_alike({"allocate", {detail::concat("region ", number)}, {number, 0}, nbytes, 0, 0});
  check_cuda(cudaMemsetAsync(region.data, 0, nbytes, stream()), "cudaMemsetAsync");
  std::lock_guard lock(regions_mutex_);
  regions_[number] = std::move(region);
  return number;
}

Region DeviceCommunicator::find_region(int64_t number) const {
  std::lock_guard lock(regions_mutex_);
  const auto found = regions_.find(number);
  check(found != regions_.end(), "there is no region ", number, " (released?)");
  return found->second;
}

void* DeviceCommunicator::region_data(int64_t region) { return find_region(region).data; }

void DeviceCommunicator::release(int64_t region) {
  Region dropped;  // freed without the lock
  std::lock_guard lock(regions_mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end()) return;
  dropped = std::move(found->second);
  regions_.erase(found);
}

DeviceCommunicator::SendBuffer& DeviceCommunicator::next_send_buffer(const Tag& tag,
                                                                     int64_t nbytes) {
  SendBuffer& buffer = send_buffers_[num_sends_++ & 1];
  if (nbytes > buffer.region.nbytes) {
    if (buffer.read != nullptr) buffer.read->ended_within(surroundings_.timeout);
    buffer = {};  // first: both at once may not fit
    buffer.region = make_alike({"allocate a send buffer", tag, {}, nbytes, 0, 0});
  }
  return buffer;
}

void DeviceCommunicator::poison(void* data, int64_t nbytes) {
  const DeviceGuard guard(device());
  check_cuda(cudaMemsetAsync(data, 0xff, nbytes, surroundings_.stream->current()),
             "cudaMemsetAsync");
}

// ---- Collectives

void DeviceCommunicator::check_gather(const GatherOp& op, const Region& region) const {
  for (const GatherSegment& s : op.segments) {
    const int64_t begin = op.place.offset + s.dst_offset;
    const int64_t nbytes = s.numel * size() * itemsize(s.dst_dtype);
    check(s.numel >= 0 && op.place.offset >= 0 && s.dst_offset >= 0 &&
              nbytes <= region.nbytes - begin,
          "unit '", op.tag.unit, "': ", nbytes, " bytes at ", begin, " of a region of ",
          region.nbytes);
  }
}

void DeviceCommunicator::all_gather(const GatherOp& op) {
  const Region region = find_region(op.place.region);
  check_gather(op, region);
  announce({"all_gather", op.tag, op.place, gathered_bytes(op, size()), 0, details_of(op)}, {});
  run([&] { gather(op, region); });
}

void DeviceCommunicator::cast_own(const GatherOp& op, const Region& region) {
  for (const GatherSegment& s : op.segments) {
    const int64_t offset = s.dst_offset + rank() * s.numel * itemsize(s.dst_dtype);
    const Piece piece{s.shard, region.data + op.place.offset + offset, s.numel};
    convert({&piece, 1}, s.shard_dtype, s.dst_dtype, 1.0, false, stream());
  }
}

void DeviceCommunicator::gather(const GatherOp& op, const Region& region) {
  cast_own(op, region);
  in_group([&] {
    for (const GatherSegment& s : op.segments)
      all_gather_in_place(region.data + op.place.offset + s.dst_offset,
                          s.numel * itemsize(s.dst_dtype));
  });
}

void DeviceCommunicator::pack_gradients(std::span<const ConstSpan> srcs, DType from, void* flat,
                                        DType to, int64_t flat_numel, bool accumulate) {
  const DeviceGuard guard(device());
  const auto pieces = pieces_of(srcs, from, static_cast<char*>(flat), to, flat_numel);
  convert(pieces, from, to, 1.0, accumulate, surroundings_.stream->current());
}

void DeviceCommunicator::prepare(const ReduceOp& op) {
  check_usable();
  const SendLayout layout(op, size());
  SendBuffer& send = next_send_buffer(op.tag, layout.nbytes);
  const cudaStream_t current = surroundings_.stream->current();
  if (send.read != nullptr) send.read->hold(current);
  for (size_t i = 0; i < op.segments.size(); ++i) {
    const ReduceSegment& s = op.segments[i];
    pack_gradients(s.grads, s.grad_dtype, send.region.data + layout.offsets[i], s.wire_dtype,
                   size() * s.numel, false);
  }
  surroundings_.stream->order(current, stream());
  packed_ = &send;
}

void DeviceCommunicator::reduce_scatter(ReduceOp& op) {
  const SendLayout layout(op, size());
  const auto num_used = static_cast<int64_t>(op.used.size());
  op.used_late =
      announce({"reduce_scatter", op.tag, {}, layout.nbytes, num_used, details_of(op)}, op.used);
  SendBuffer& send = *std::exchange(packed_, nullptr);
  run([&] { sum_into_shards(op, layout, send.region); });
  send.read = surroundings_.stream->record();
}

void DeviceCommunicator::sum_into_shards(const ReduceOp& op, const SendLayout& layout,
                                         const Region& send) {
  in_group([&] {
    for (size_t i = 0; i < op.segments.size(); ++i)
      reduce_scatter_in_place(send.data + layout.offsets[i], op.segments[i].wire_dtype,
                              op.segments[i].numel);
  });
  for (size_t i = 0; i < op.segments.size(); ++i) {
    const ReduceSegment& s = op.segments[i];
    const int64_t own = layout.offsets[i] + rank() * s.numel * itemsize(s.wire_dtype);
    const Piece piece{send.data + own, s.shard, s.numel};
    convert({&piece, 1}, s.wire_dtype, s.shard_dtype, s.scale, s.accumulate, stream());
  }
}

void DeviceCommunicator::all_reduce(const Tag& tag, void* data, DType dtype, int64_t numel,
                                    double scale) {
  Hasher hasher;
  hasher.add(uint64_t(dtype));
  announce({"all_reduce", tag, {}, numel * itemsize(dtype), 0, hasher.value()}, {});
  run([&] { all_reduce_in_place(data, dtype, numel); });
  if (scale == 1.0) return;
  const Piece piece{data, data, numel};
  convert({&piece, 1}, dtype, dtype, scale, false, stream());
}

void DeviceCommunicator::all_gather_in_place(void*, int64_t) {}
void DeviceCommunicator::reduce_scatter_in_place(void*, DType, int64_t) {}
void DeviceCommunicator::all_reduce_in_place(void*, DType, int64_t) {}

void DeviceCommunicator::barrier(const Tag& tag) { agree_now({"barrier", tag, {}, 0, 0, 0}, {}); }

}  // namespace fsdpx::cuda
