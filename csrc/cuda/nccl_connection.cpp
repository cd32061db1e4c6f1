#include "nccl_connection.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "../check.h"

namespace fsdpx::cuda::nccl {
namespace {

constexpr auto kPause = std::chrono::microseconds(200);
constexpr auto kPatience = std::chrono::seconds(1);  // a call that takes longer hangs

}  // namespace

Connection::Connection(const Surroundings& surroundings)
    : surroundings_(surroundings), pid_(getpid()) {
  const DeviceGuard guard(surroundings.device());
  try {
    connect();
  } catch (...) {
    abort();
    throw;
  }
}

Connection::~Connection() { abort(); }

void Connection::connect() {
  UniqueId id = {};
  check_all(surroundings_, detail::problem_of([&] {
              if (surroundings_.rank() == 0)
                nccl_.check(nccl_.ncclGetUniqueId(&id), "ncclGetUniqueId");
            }),
            "use NCCL");
  const std::vector<char> all = exchange(surroundings_, &id, sizeof(id));
  std::copy_n(all.begin(), sizeof(id), id.bytes);
  on_root("ncclCommInitRankConfig", [&](Comm) {
    Config config;
    config.blocking = 0;
    Comm root = nullptr;
    const Result result = nccl_.ncclCommInitRankConfig(&root, surroundings_.size(), id,
                                                       surroundings_.rank(), &config);
    std::lock_guard lock(mutex_);
    root_ = root;
    return result;
  });
}

Comm Connection::split() {
  const DeviceGuard guard(surroundings_.device());
  Comm made = nullptr;
  on_root(
      "ncclCommSplit",
      [&](Comm root) {
        Config config;
        config.blocking = 1;
        return nccl_.ncclCommSplit(root, 0, surroundings_.rank(), &made, &config);
      },
      &made);
  std::lock_guard lock(mutex_);
  splits_.push_back(made);
  return made;
}

// All ranks hear whether all could: otherwise some would go on, and others to something else.
void Connection::on_root(const char* what, const std::function<Result(Comm root)>& call,
                         const Comm* made) {
  check_all(surroundings_, detail::problem_of([&] {
              try {
                const Calls calls(*this);
                nccl_.check(call(root_), what, root_);
                settle(what, root_);
                if (made != nullptr) settle(what, *made);
              } catch (const CommTimeout&) {
                abort();  // or NCCL may end it later, when nobody expects it
                throw;
              }
            }),
            "use NCCL");
}

void Connection::alone(const std::function<void(Comm root)>& call) noexcept {
  try {
    const Calls calls(*this);
    call(root_);
  } catch (const std::exception&) {
    // it was aborted
  }
}

bool Connection::has_settled(const char* what, Comm comm) {
  std::lock_guard lock(mutex_);
  check_open();
  Result state = kSuccess;
  nccl_.check(nccl_.ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError", comm);
  nccl_.check(state, what, comm);
  return state != kInProgress;
}

// Waits until `comm` is ready for the next call.
void Connection::settle(const char* what, Comm comm) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const double limit = surroundings_.timeout / 2;  // the others still wait to hear of it
  while (true) {
    if (has_settled(what, comm)) return;
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    check<CommTimeout>(seconds < limit, what, " of ", surroundings_.size(),
                       " ranks did not end within ", limit,
                       " s: some rank did not come to it, or NCCL cannot reach it; "
                       "NCCL_DEBUG=INFO tells more. Raise the time limit if it is only slow");
    std::this_thread::sleep_for(kPause);
  }
}

Connection::Calls::Calls(Connection& connection) : lock_(connection.calls_) {
  std::lock_guard lock(connection.mutex_);
  connection.check_open();
}

void Connection::check_open() const {
  fsdpx::check<std::runtime_error>(!aborted_, "the NCCL communicator was aborted");
}

std::string Connection::problem() {
  std::lock_guard lock(mutex_);
  std::vector<Comm> comms = splits_;
  if (root_ != nullptr) comms.push_back(root_);
  for (const Comm comm : comms) {
    Result error = kSuccess;
    nccl_.ncclCommGetAsyncError(comm, &error);
    if (error != kSuccess && error != kInProgress)
      return detail::concat("NCCL reports on rank ", surroundings_.rank(), ": ",
                            nccl_.ncclGetErrorString(error), " (", nccl_.ncclGetLastError(comm),
                            ")");
  }
  return {};
}

// Also how communicators that have nothing to do end: destroying would wait for the other ranks,
// which may be gone.
void Connection::abort() noexcept {
  if (getpid() != pid_) return;  // in a forked child they are its parent's
  std::vector<Comm> comms;
  {
    std::lock_guard lock(mutex_);
    aborted_ = true;  // no further call begins
    comms = std::exchange(splits_, {});
    if (root_ != nullptr) comms.push_back(std::exchange(root_, nullptr));
  }
  const std::unique_lock<std::timed_mutex> idle(calls_, kPatience);  // or it hangs
  for (const Comm comm : comms) nccl_.ncclCommAbort(comm);
}

}  // namespace fsdpx::cuda::nccl
