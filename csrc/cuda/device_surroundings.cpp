#include "device_surroundings.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "../check.h"

namespace fsdpx::cuda {
namespace {

constexpr int64_t kMessage = 256;

// Calls `task` with a region of `control`, in the order of its collectives.
template <typename Task>
void with_region(const Surroundings& surroundings, int64_t nbytes, Task task) {
  const auto run = [&task, nbytes, &control = *surroundings.control] {
    const int64_t region = control.allocate(nbytes);
    task(control, region);
    control.release(region);
  };
  const auto forever = std::numeric_limits<double>::infinity();  // control has a limit of its own
  surroundings.control_stream->enqueue(run)->wait(forever);
}

}  // namespace

std::vector<char> exchange(const Surroundings& surroundings, const void* mine, int64_t nbytes) {
  std::vector<char> all(nbytes * surroundings.size());
  with_region(surroundings, std::ssize(all), [&](Communicator& control, int64_t region) {
    GatherOp op;
    op.tag.unit = "exchange";
    op.place = {region, 0};
    op.segments.push_back({mine, DType::kBits8, nbytes, 0, DType::kBits8});
    control.all_gather(op);
    std::memcpy(all.data(), control.region_data(region), all.size());
  });
  return all;
}

void check_all(const Surroundings& surroundings, const std::string& problem, const char* what) {
  char mine[kMessage] = {};
  problem.copy(mine, kMessage - 1);
  const std::vector<char> all = exchange(surroundings, mine, kMessage);
  for (int rank = 0; rank < surroundings.size(); ++rank) {
    const char* const theirs = &all[rank * kMessage];
    check<std::runtime_error>(*theirs == '\0', "rank ", rank, " cannot ", what, ": ", theirs);
  }
}

std::vector<std::shared_ptr<void>> shared_words(const Surroundings& surroundings, int64_t nbytes) {
  std::vector<std::shared_ptr<void>> parts;
  with_region(surroundings, nbytes,
              [&](Communicator& control, int64_t region) { parts = control.parts(region); });
  check<std::runtime_error>(!parts.empty(), "GPU memory is mapped by ranks of one host only");
  return parts;
}

}  // namespace fsdpx::cuda
