// The life of NCCL's communicators of one group of ranks: made within a time limit, and ended from
// any thread.
//
// The root communicator is not blocking: to make it, to split it and to register windows with it
// takes all ranks, and each is begun and then asked about until it has ended or its time is over.
// Those split from it run the collectives. They block, as a call that does not costs a thread of
// NCCL's.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "device_surroundings.h"
#include "nccl_library.h"

namespace fsdpx::cuda::nccl {

class Connection {
 public:
  // Collective. Throws on every rank, naming one, when some rank could not connect in time.
  explicit Connection(const Surroundings& surroundings);
  ~Connection();  // aborts
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Another communicator of the same ranks, for collectives; lives as long as this. Collective.
  Comm split();

  // Begins `call` on the root and waits until it has ended. Collective; throws on every rank,
  // naming one, when on some rank it fails or does not end in time. `made` is what it makes, to be
  // ready as well.
  void on_root(const char* what, const std::function<Result(Comm root)>& call,
               const Comm* made = nullptr);
  // What needs no other rank. Nothing is called after abort(), which ended what the call is about.
  void alone(const std::function<void(Comm root)>& call) noexcept;

  // Keeps abort() from freeing what NCCL is at work on, on this thread. Throws after abort().
  class Calls {
   public:
    explicit Calls(Connection& connection);

   private:
    const std::unique_lock<std::timed_mutex> lock_;
  };

  // What NCCL says went wrong meanwhile, or nothing.
  std::string problem();

  // Ends what runs, on the GPU and inside of NCCL; from any thread. A call that another thread is
  // about to finish is waited for, one that hangs is not: that is what ends it.
  void abort() noexcept;

 private:
  void connect();
  void settle(const char* what, Comm comm);
  bool has_settled(const char* what, Comm comm);
  void check_open() const;  // with the pointers' mutex

  const Library& nccl_ = library();
  const Surroundings surroundings_;
  const int pid_;
  std::timed_mutex calls_;  // who holds it is inside of NCCL
  std::mutex mutex_;        // of the pointers
  Comm root_ = nullptr;
  std::vector<Comm> splits_;
  bool aborted_ = false;
};

}  // namespace fsdpx::cuda::nccl
