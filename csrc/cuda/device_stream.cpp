#include "device_stream.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "../check.h"

namespace fsdpx::cuda {

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  check<std::runtime_error>(false, what, ": ", cudaGetErrorString(error));
}

void watch_over(int device) noexcept {
  cudaSetDevice(device);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
}

DeviceGuard::DeviceGuard(int device) {
  int now = 0;
  check_cuda(cudaGetDevice(&now), "cudaGetDevice");
  if (now == device) return;
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  before_ = now;
}

DeviceGuard::~DeviceGuard() {
  if (before_ >= 0) cudaSetDevice(before_);
}

cudaEvent_t EventPool::take() {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, flags_), "cudaEventCreate");
  return event;
}

void EventPool::give(cudaEvent_t event) {
  std::lock_guard lock(mutex_);
  free_.push_back(event);
}

// ---- Events

DeviceEvent::DeviceEvent(int device, std::shared_ptr<EventPool> pool, cudaStream_t stream,
                         CurrentStream current, std::exception_ptr error)
    : device_(device),
      pool_(std::move(pool)),
      current_(current),
      event_(pool_->take()),
      error_(std::move(error)) {
  check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord");
}

DeviceEvent::~DeviceEvent() { pool_->give(event_); }

bool DeviceEvent::query() const { return cudaEventQuery(event_) != cudaErrorNotReady; }

bool DeviceEvent::ended_within(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  auto pause = std::chrono::microseconds(10);
  while (!query()) {
    if (std::chrono::duration<double>(Clock::now() - begin).count() > seconds) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(1000));
  }
  return true;
}

void DeviceEvent::wait(double, const std::function<void()>&) {
  if (error_) std::rethrow_exception(error_);
  const cudaStream_t stream = current_(device_);
  hold(stream);
  std::lock_guard lock(mutex_);
  if (std::find(waited_.begin(), waited_.end(), stream) == waited_.end()) waited_.push_back(stream);
  latest_.store(stream, std::memory_order_relaxed);
}

bool DeviceEvent::is_followed() const {
  const cudaStream_t stream = current_(device_);
  if (stream == latest_.load(std::memory_order_relaxed)) return true;
  std::lock_guard lock(mutex_);
  return std::find(waited_.begin(), waited_.end(), stream) != waited_.end();
}

std::vector<cudaStream_t> DeviceEvent::waited() const {
  std::lock_guard lock(mutex_);
  return waited_;
}

void DeviceEvent::hold(cudaStream_t stream) const {
  const DeviceGuard guard(device_);
  check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
}

// ---- Times

class DeviceClock::Point final : public TimePoint {
 public:
  Point(std::shared_ptr<DeviceClock> clock, std::shared_ptr<const Anchor> anchor,
        cudaStream_t stream)
      : clock_(std::move(clock)), anchor_(std::move(anchor)), event_(clock_->pool_.take()) {
    check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  ~Point() override { clock_->pool_.give(event_); }

  int64_t ns() override {
    float ms = 0;
    check_cuda(cudaEventSynchronize(event_), "cudaEventSynchronize");
    check_cuda(cudaEventElapsedTime(&ms, anchor_->event, event_), "cudaEventElapsedTime");
    return anchor_->ns + static_cast<int64_t>(ms * 1e6);
  }

 private:
  const std::shared_ptr<DeviceClock> clock_;
  const std::shared_ptr<const Anchor> anchor_;
  const cudaEvent_t event_;
};

Instant DeviceClock::at_end_of(cudaStream_t stream) {
  const DeviceGuard guard(device_);
  std::lock_guard lock(mutex_);
  // An elapsed time has 24 bits: the anchor must not be old.
  constexpr int64_t kOld = 1'000'000'000;
  const bool unused = anchor_ != nullptr && anchor_.use_count() == 1;
  if (anchor_ == nullptr || (unused && now_ns() - anchor_->ns > kOld)) {
    const cudaEvent_t event = pool_.take();
    check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(event), "cudaEventSynchronize");
    if (anchor_ != nullptr) pool_.give(anchor_->event);
    anchor_ = std::make_shared<Anchor>(Anchor{event, now_ns()});
  }
  return Instant(std::make_shared<Point>(shared_from_this(), anchor_, stream));
}

Clock DeviceStream::clock() {
  return [clock = clock_, stream = stream_] { return clock->at_end_of(stream); };
}

Instant DeviceStream::computed() { return clock_->at_end_of(current()); }

// ---- The stream

DeviceStream::DeviceStream(int device, cudaStream_t stream, CurrentStream current)
    : device_(device),
      stream_(stream),
      current_(current),
      pid_(getpid()),
      clock_(std::make_shared<DeviceClock>(device)) {}

std::shared_ptr<Event> DeviceStream::enqueue(std::function<void()> task) {
  check<std::runtime_error>(getpid() == pid_, "this communication stream belongs to process ", pid_,
                            ". A forked child can't use CUDA; start workers with 'spawn' or "
                            "'forkserver'.");
  {
    std::lock_guard lock(mutex_);
    check<std::runtime_error>(!closed_, "the communication stream is closed");
  }
  const DeviceGuard guard(device_);
  check_not_captured();
  std::exception_ptr error;
  try {
    task();  // without the lock: it may wait for Python
  } catch (...) {
    error = std::current_exception();
  }
  task = nullptr;
  auto event = std::make_shared<DeviceEvent>(device_, pool_, stream_, current_, std::move(error));
  std::lock_guard lock(mutex_);
  latest_ = event;
  return event;
}

// A graph would repeat the kernels, but not what the ranks' CPUs tell each other for each of them.
void DeviceStream::check_not_captured() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(current(), &status), "cudaStreamIsCapturing");
  check<std::runtime_error>(status == cudaStreamCaptureStatusNone,
                            "collectives can't be captured in a CUDA graph: run the model "
                            "outside of the capture");
}

void DeviceStream::close(double seconds) {
  if (getpid() != pid_) return;
  std::shared_ptr<Event> latest;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    latest = std::exchange(latest_, nullptr);
  }
  if (latest != nullptr) latest->ended_within(seconds);
}

std::shared_ptr<Event> DeviceStream::mark() {
  const DeviceGuard guard(device_);
  return std::make_shared<DeviceEvent>(device_, pool_, current(), current_);
}

void DeviceStream::follow(const Event& mark) {
  const auto* event = dynamic_cast<const DeviceEvent*>(&mark);
  check(event != nullptr, "a CUDA stream can't follow an event of the CPU");
  event->hold(stream_);
}

std::vector<std::shared_ptr<Event>> DeviceStream::marks_of_users(const Event& event) {
  const DeviceGuard guard(device_);
  std::vector<std::shared_ptr<Event>> marks = {mark()};
  for (const cudaStream_t stream : dynamic_cast<const DeviceEvent&>(event).waited()) {
    if (stream == current()) continue;
    marks.push_back(std::make_shared<DeviceEvent>(device_, pool_, stream, current_));
  }
  return marks;
}

std::shared_ptr<DeviceEvent> DeviceStream::record() {
  return std::make_shared<DeviceEvent>(device_, pool_, stream_, current_);
}

void DeviceStream::order(cudaStream_t first, cudaStream_t then) {
  DeviceEvent(device_, pool_, first, current_).hold(then);
}

}  // namespace fsdpx::cuda
