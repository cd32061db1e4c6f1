// What a communicator on a GPU runs on, and how its ranks' CPUs talk while it connects.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../communicator.h"
#include "device_stream.h"

namespace fsdpx::cuda {

struct Surroundings {
  std::shared_ptr<DeviceStream> stream;
  std::shared_ptr<Communicator> control;  // the same ranks on CPU; its tasks run on the next
  std::shared_ptr<Stream> control_stream;
  double timeout = 1800;  // seconds, of each collective

  int rank() const { return control->rank(); }
  int size() const { return control->size(); }
  int device() const { return stream->device(); }
};

// The ranks' messages of `nbytes` each, in rank order. Collective; waits on the host, no longer
// than `control` does.
std::vector<char> exchange(const Surroundings& surroundings, const void* mine, int64_t nbytes);

// Every rank's `problem`, which is empty where there is none: throws on every rank when some rank
// has one, naming it and saying that it cannot do `what`. Collective.
void check_all(const Surroundings& surroundings, const std::string& problem, const char* what);

// `nbytes` of zeroed CPU memory of each rank, by rank, mapped here for as long as it is used: only
// where the ranks are on one host, else it throws on every rank. Collective.
std::vector<std::shared_ptr<void>> shared_words(const Surroundings& surroundings, int64_t nbytes);

}  // namespace fsdpx::cuda
