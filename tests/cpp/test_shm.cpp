// The shared-memory communicator: the numbers, under random delays and poisoned memory, and what
// happens when ranks differ, fail or leave.
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "../../csrc/check.h"
#include "check.h"
#include "shm_communicator.h"
#include "shm_group.h"

namespace fsdpx::test {
namespace {

const ShmOptions kPatient = {.timeout = 60, .connect_timeout = 60};

ShmOptions limited(double timeout) {
  ShmOptions options = kPatient;
  options.timeout = timeout;
  return options;
}

float value_of(int rank, int step, int64_t i) {
  return static_cast<float>((rank * 7 + step * 3 + i) % 64);
}

// One step of a unit: gather, look, poison, reduce, look.
struct Worker {
  Communicator& comm;
  const int64_t numel;
  const int64_t region;
  std::mt19937 random;
  std::vector<float> shard = std::vector<float>(numel);
  std::vector<float> full_grad = std::vector<float>(numel * comm.size());
  std::vector<float> grad_shard = std::vector<float>(numel);

  Worker(Communicator& comm, int64_t numel)
      : comm(comm),
        numel(numel),
        region(comm.allocate(2 * numel * comm.size() * 4)),
        random(comm.rank() + 1) {}

  int64_t offset_of(int step) const { return (step % 2) * numel * comm.size() * 4; }
  float* place(int step) const {
    return reinterpret_cast<float*>(static_cast<char*>(comm.region_data(region)) + offset_of(step));
  }

  void gather(int step, const std::string& unit) {
    for (int64_t i = 0; i < numel; ++i) shard[i] = value_of(comm.rank(), step, i);
    // A free place holds poison: a rank that writes too early, or a reader that reads too early,
    // shows.
    std::fill(place(step), place(step) + numel * comm.size(),
              std::numeric_limits<float>::quiet_NaN());
    random_delay(random);
    comm.all_gather({{unit, {uint32_t(step)}},
                     {region, offset_of(step)},
                     {{shard.data(), DType::kFloat32, numel, 0, DType::kFloat32}}});
    random_delay(random);
    int wrong = 0;
    for (int rank = 0; rank < comm.size(); ++rank)
      for (int64_t i = 0; i < numel; ++i)
        wrong += place(step)[rank * numel + i] != value_of(rank, step, i);
    if (wrong > 0) throw std::runtime_error("gathered values differ");
  }

  void reduce(int step, const std::string& unit) {
    for (size_t i = 0; i < full_grad.size(); ++i) full_grad[i] = value_of(comm.rank(), step, i);
    const int64_t half = numel * comm.size() / 2, all = numel * comm.size();
    ReduceOp op;
    op.tag = {unit, {uint32_t(step)}};
    op.used.resize(3);
    op.used[comm.rank() % 2] = 1;
    op.segments.push_back(
        {{{full_grad.data(), half, 0}, {full_grad.data() + half, all - half, half}},
         DType::kFloat32,
         DType::kFloat32,
         numel,
         grad_shard.data(),
         DType::kFloat32,
         0.5,
         false});
    random_delay(random);
    comm.reduce_scatter(op);
    int wrong = 0;
    for (int64_t i = 0; i < numel; ++i) {
      float sum = 0;
      for (int rank = 0; rank < comm.size(); ++rank)
        sum += value_of(rank, step, comm.rank() * numel + i);
      wrong += grad_shard[i] != sum * 0.5f;
    }
    const bool flags = op.used[0] == 1 && op.used[1] == (comm.size() > 1) && op.used[2] == 0;
    if (wrong > 0 || !flags) throw std::runtime_error("reduced values differ");
  }
};

void many_steps(Communicator& comm, int num_steps, int64_t numel) {
  Worker worker(comm, numel);
  std::mt19937 branches(7);  // the same on all ranks
  for (int step = 0; step < num_steps; ++step) {
    worker.gather(step, "unit" + std::to_string(step % 3));
    if (branches() % 3 != 0) worker.reduce(step, "unit" + std::to_string(step % 3));
    if (branches() % 50 == 0) {  // regions come and go
      const int64_t extra = comm.allocate(1 + branches() % 10000);
      comm.release(extra);
    }
    if (branches() % 20 == 0) comm.barrier({"barrier"});
  }
}

void sum_everywhere(Communicator& comm) {
  for (const int64_t numel : {0, 1, 2, 7, 1000}) {
    std::vector<double> data(numel);
    for (int64_t i = 0; i < numel; ++i) data[i] = static_cast<double>(i + comm.rank());
    comm.all_reduce({"sums"}, data.data(), DType::kFloat64, numel, 2.0);
    const int size = comm.size();
    for (int64_t i = 0; i < numel; ++i)
      CHECK_EQ(data[i], 2.0 * static_cast<double>(size * i + size * (size - 1) / 2));
  }
}

bool all_zero(const std::vector<int>& codes) {
  return std::all_of(codes.begin(), codes.end(), [](int code) { return code == 0; });
}

// What `call` throws, as text; empty when it does not.
template <typename Error>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

double seconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

TEST(one_rank_runs_the_same_path) {
  ShmBootstrap bootstrap("private");
  auto comm = bootstrap.connect(0, {""}, kPatient);
  many_steps(*comm, 100, 50);
  sum_everywhere(*comm);
}

TEST(threads_that_share_mappings) {
  for (int size = 2; size <= 4; ++size)
    run_local(size, kPatient, [](Communicator& comm) { many_steps(comm, 600, 40); });
}

TEST(threads_over_sockets_and_names) {
  for (const char* way : {"sockets", "names"}) {
    for (int size : {1, 2, 3}) {
      run_threads(way, size, kPatient, [](Communicator& comm) {
        many_steps(comm, 300, 100);
        sum_everywhere(comm);
      });
    }
  }
}

TEST(processes_over_sockets_and_names) {
  for (const char* way : {"sockets", "names"}) {
    for (int size : {2, 4}) {
      const auto codes = run_processes(way, size, kPatient, [](Communicator& comm) {
        many_steps(comm, 500, 1000);
        sum_everywhere(comm);
      });
      CHECK(all_zero(codes));
    }
  }
}

TEST(send_buffers_grow_with_the_units) {
  run_threads("sockets", 2, kPatient, [](Communicator& comm) {
    for (const int64_t numel : {1, 100, 5000, 10, 20000, 100000}) {
      Worker worker(comm, numel);
      for (int step = 0; step < 3; ++step) worker.reduce(step, "growing");
    }
  });
}

TEST(large_reductions_go_in_parts) {
  ShmOptions options = kPatient;
  options.max_send_bytes = 2000;  // of several numbers of whole blocks, and a rest
  for (int size = 1; size <= 3; ++size) {
    run_threads("sockets", size, options, [](Communicator& comm) {
      many_steps(comm, 20, 1003);
      sum_everywhere(comm);
    });
  }
}

TEST(regions_are_zeroed_and_page_aligned) {
  run_threads("sockets", 2, kPatient, [](Communicator& comm) {
    const int64_t region = comm.allocate(10000);
    auto* data = static_cast<unsigned char*>(comm.region_data(region));
    CHECK_EQ(reinterpret_cast<uintptr_t>(data) % 4096, 0u);
    CHECK_EQ(std::accumulate(data, data + 10000, 0), 0);
    comm.release(region);
    check_throws<InvalidArgument>(__FILE__, __LINE__, "no region",
                                  [&] { comm.region_data(region); });
  });
}

TEST(ranks_that_differ_all_learn_it) {
  run_local(3, kPatient, [](Communicator& comm) {
    Worker worker(comm, 10);
    worker.gather(0, "first");
    const auto error = error_of<DesyncError>([&] {
      if (comm.rank() == 1) {
        worker.reduce(1, "layers.1");
      } else {
        worker.gather(1, "layers.0");
      }
    });
    CHECK(has(error, "all_gather of unit 'layers.0'"));
    CHECK(has(error, "unit 'layers.1'"));
    CHECK(has(error, "rank 1"));
    // Of no use from here on, at once.
    CHECK(has(error_of<DesyncError>([&] { comm.barrier({"later"}); }), "layers.1"));
  });
}

TEST(places_and_sizes_are_compared) {
  const auto differ = [](const std::function<void(GatherOp&)>& change) {
    run_local(2, kPatient, [&](Communicator& comm) {
      std::vector<float> shard(64);
      const int64_t region = comm.allocate(4096);
      GatherOp op = {{"u"}, {region, 0}, {{shard.data(), DType::kFloat32, 8, 0, DType::kFloat32}}};
      if (comm.rank() == 1) change(op);
      CHECK(has(error_of<DesyncError>([&] { comm.all_gather(op); }), "differs between ranks"));
    });
  };
  differ([](GatherOp& op) { op.place.offset = 64; });
  differ([](GatherOp& op) { op.segments[0].numel = 9; });
  differ([](GatherOp& op) { op.segments[0].dst_dtype = DType::kBFloat16; });
}

TEST(a_rank_that_never_comes_is_a_timeout_everywhere) {
  run_local(3, limited(0.3), [](Communicator& comm) {
    comm.barrier({"together"});
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      CHECK(has(error_of<CommTimeout>([&] { comm.barrier({"late"}); }), "rank 2"));
      return;
    }
    std::string error;
    const double seconds =
        seconds_of([&] { error = error_of<CommTimeout>([&] { comm.barrier({"layers.5"}); }); });
    CHECK(seconds < 1.2);
    CHECK(has(error, "layers.5"));
    CHECK(has(error, "collective 3"));
    CHECK(has(error, "2 has finished 2 (barrier of unit 'together')"));
  });
}

TEST(a_failure_on_one_rank_reaches_all) {
  run_local(2, kPatient, [](Communicator& comm) {
    Worker worker(comm, 10);
    const auto error = error_of<std::exception>([&] {
      if (comm.rank() == 0) {
        comm.all_gather({{"u"}, {99, 0}, {}});
      } else {
        worker.gather(0, "u");
      }
    });
    CHECK(has(error, "no region 99"));
  });
}

TEST(a_rank_that_leaves_is_noticed_at_once) {
  run_threads("sockets", 2, kPatient, [](Communicator& comm) {
    comm.barrier({"together"});
    if (comm.rank() == 1) return;  // closes
    std::string error;
    const double seconds =
        seconds_of([&] { error = error_of<std::runtime_error>([&] { comm.barrier({"alone"}); }); });
    CHECK(seconds < 5);
    CHECK(has(error, "rank 1 has left"));
  });
}

TEST(a_killed_rank_is_noticed_by_its_socket) {
  const auto codes = run_processes("sockets", 3, kPatient, [](Communicator& comm) {
    comm.barrier({"together"});
    if (comm.rank() == 1) _exit(9);
    std::string error;
    const double seconds =
        seconds_of([&] { error = error_of<std::runtime_error>([&] { comm.barrier({"alone"}); }); });
    CHECK(seconds < 5);
    CHECK(has(error, "the process of rank 1 has ended"));
  });
  CHECK_EQ(codes[0], 0);
  CHECK_EQ(codes[1], 9);
  CHECK_EQ(codes[2], 0);
}

TEST(close_ends_a_wait_of_this_rank) {
  run_local(2, kPatient, [](Communicator& comm) {
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      return;
    }
    std::thread closer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      comm.close();
    });
    CHECK(has(error_of<std::runtime_error>([&] { comm.barrier({"alone"}); }), "closed"));
    closer.join();
  });
}

TEST(a_forked_child_gets_an_error_and_leaves_the_group_alone) {
  run_threads("sockets", 1, kPatient, [](Communicator& comm) {
    const pid_t child = fork();
    if (child == 0) {
      const bool clear =
          has(error_of<std::runtime_error>([&] { comm.barrier({"child"}); }), "forked child");
      comm.close();
      _exit(clear ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK_EQ(WEXITSTATUS(status), 0);
    comm.barrier({"parent"});
  });
}

}  // namespace fsdpx::test
