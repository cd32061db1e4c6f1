// When GPU memory that other ranks map may be freed: CUDA leaves undefined what a mapping of freed
// memory is, so it is when all ranks have unmapped it. Nobody waits for that. Memory that is not
// used here any more, but still mapped by somebody, is parked, and freed by a later call of this
// process. What a rank maps that died stays parked.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "device_surroundings.h"

namespace fsdpx::cuda {

// Where the ranks of one communicator tell each other, in shared CPU memory, what they have
// unmapped. A rank writes its own words only.
class Leases {
 public:
  explicit Leases(const Surroundings& surroundings);  // collective

  // The number of the next region that ranks map; alike on all ranks, as regions are made alike.
  int64_t next() { return ++num_regions_; }

  // This rank maps no part of that region any more, or of any region. Then frees what it may.
  void give_up(int64_t region) noexcept;
  void give_up_all() noexcept;

  bool given_up(int64_t region) const;  // by all ranks
  bool all_given_up() const;            // all regions

  // In a forked child nothing is given up: the mappings are its parent's.
  bool is_ours() const;

 private:
  using Word = std::atomic<int64_t>;
  Word& word(int rank, int64_t number) const;

  const int rank_, size_, pid_;
  const std::vector<std::shared_ptr<void>> parts_;
  int64_t num_regions_ = 0;
};

// Frees `memory`, which it holds alone, now or once all ranks have given the region up.
void park(std::shared_ptr<void> memory, std::shared_ptr<const Leases> leases, int64_t region);

// Frees what nobody maps any more; how many pieces are left.
int64_t free_parked() noexcept;

// The same, again and again until none is left, for at most `seconds`.
bool wait_for_parked(double seconds) noexcept;

}  // namespace fsdpx::cuda
