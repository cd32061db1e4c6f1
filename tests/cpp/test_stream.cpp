// Streams under many threads: order, hand-over of what tasks own, and closing at any moment. Meant
// for the race detector too.
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/check.h"
#include "check.h"
#include "worker_stream.h"

namespace fsdpx::test {

TEST(tasks_of_one_thread_run_in_order) {
  WorkerStream stream("test");
  std::vector<int> seen;  // written by the worker, read after the last event
  std::shared_ptr<Event> last;
  for (int i = 0; i < 2000; ++i) last = stream.enqueue([&seen, i] { seen.push_back(i); });
  last->wait(60);
  CHECK_EQ(seen.size(), 2000u);
  for (int i = 0; i < 2000; ++i) CHECK_EQ(seen[i], i);
  stream.close(10);
}

TEST(many_threads_issue_and_wait) {
  WorkerStream stream("test");
  int64_t sum = 0;  // only the worker touches it
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 300; ++i) {
        auto owned = std::make_shared<int>(i);
        const std::weak_ptr<int> watch = owned;
        auto event = stream.enqueue([&sum, owned = std::move(owned)] { sum += *owned; });
        if (random() % 3 == 0) {
          event->wait(60);
          CHECK(watch.expired());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stream.close(60);
  CHECK_EQ(sum, 4 * 300 * 299 / 2);
}

TEST(errors_reach_only_their_event) {
  WorkerStream stream("test");
  auto bad = stream.enqueue([] { throw DesyncError("bad"); });
  auto good = stream.enqueue([] {});
  CHECK_THROWS(DesyncError, "bad", bad->wait(60));
  CHECK_THROWS(DesyncError, "bad", bad->wait(60));
  good->wait(60);
  stream.close(10);
}

TEST(streams_go_at_any_moment) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    auto count = std::make_shared<std::atomic<int>>(0);
    std::vector<std::shared_ptr<Event>> events;
    {
      WorkerStream stream("test");
      for (unsigned i = 0; i < random() % 8; ++i)
        events.push_back(stream.enqueue([count] { count->fetch_add(1); }));
      if (random() % 2 == 0) std::this_thread::yield();
      if (random() % 3 == 0) stream.close(10);
    }
    // Each event ends, run or dropped.
    for (auto& event : events) CHECK(event->ended_within(60));
  }
}

}  // namespace fsdpx::test
