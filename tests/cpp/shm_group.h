// Groups of ranks for the tests of the shared-memory communicator: threads that share mappings by
// pointer (so that a race detector sees one address per byte), threads over real sockets or names,
// and forked processes.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "shm_communicator.h"
#include "shm_exchange.h"

namespace fsdpx::test {

using Body = std::function<void(Communicator&)>;

// What the ranks of one LocalExchange group share.
struct Meeting {
  explicit Meeting(int size) : size(size), offered(size), alive(size, true) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::vector<std::shared_ptr<Mapping>>> offered;  // by rank, then by call
  std::vector<char> alive;
};

class LocalExchange final : public Exchange {
 public:
  LocalExchange(int rank, std::shared_ptr<Meeting> meeting)
      : rank_(rank), meeting_(std::move(meeting)), taken_(meeting_->size) {}

  std::shared_ptr<Mapping> make(int64_t nbytes) override {
    made_ = Mapping::make_private(nbytes);
    return made_;
  }
  void offer(const Mapping&, Deadline) override {
    std::lock_guard lock(meeting_->mutex);
    meeting_->offered[rank_].push_back(made_);
    meeting_->changed.notify_all();
  }
  std::shared_ptr<Mapping> take(int rank, int64_t, Deadline) override {
    std::unique_lock lock(meeting_->mutex);
    auto& offered = meeting_->offered[rank];
    const size_t number = taken_[rank]++;
    meeting_->changed.wait(lock, [&] { return offered.size() > number; });
    return offered[number];
  }
  void finish(Mapping&) override { made_.reset(); }
  bool alive(int rank) override {
    std::lock_guard lock(meeting_->mutex);
    return meeting_->alive[rank] != 0;
  }
  void close() override {}

 private:
  const int rank_;
  std::shared_ptr<Meeting> meeting_;
  std::shared_ptr<Mapping> made_;
  std::vector<size_t> taken_;
};

inline void in_threads(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  std::vector<std::string> errors(size);
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < size; ++rank)
    if (!errors[rank].empty()) fail(__FILE__, rank, errors[rank]);
}

inline void run_local(int size, const ShmOptions& options, const Body& body) {
  auto meeting = std::make_shared<Meeting>(size);
  in_threads(size, [&](int rank) {
    auto exchange = std::make_shared<LocalExchange>(rank, meeting);
    auto control = exchange->make(sizeof(ControlBlock));
    ShmCommunicator comm(rank, size, exchange, control, options);
    body(comm);
  });
}

// Real memory: "sockets" or "names".
inline void run_threads(const std::string& way, int size, const ShmOptions& options,
                        const Body& body) {
  std::vector<std::unique_ptr<ShmBootstrap>> bootstraps;
  std::vector<std::string> addresses;
  for (int rank = 0; rank < size; ++rank) {
    bootstraps.push_back(std::make_unique<ShmBootstrap>(way));
    addresses.push_back(bootstraps.back()->address());
  }
  in_threads(size, [&](int rank) {
    auto comm = bootstraps[rank]->connect(rank, addresses, options);
    body(*comm);
    comm->close();
  });
}

// Each rank in a process of its own. Returns their exit codes: 0 when `body` returned and no check
// failed.
inline std::vector<int> run_processes(const std::string& way, int size, const ShmOptions& options,
                                      const Body& body) {
  std::vector<std::unique_ptr<ShmBootstrap>> bootstraps;
  std::vector<std::string> addresses;
  for (int rank = 0; rank < size; ++rank) {
    bootstraps.push_back(std::make_unique<ShmBootstrap>(way));
    addresses.push_back(bootstraps.back()->address());
  }
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      int code = 0;
      failures() = 0;
      try {
        auto comm = bootstraps[rank]->connect(rank, addresses, options);
        body(*comm);
        comm->close();
        code = failures() > 0 ? 2 : 0;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        code = 1;
      }
      _exit(code);
    }
    children.push_back(child);
  }
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return codes;
}

// Sleeps up to `most` microseconds, mostly not at all.
inline void random_delay(std::mt19937& random, int most = 200) {
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
}

}  // namespace fsdpx::test
