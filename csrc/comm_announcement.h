// What a rank says that it is about to do, so that ranks that do different things find out before
// data moves.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "communicator.h"

namespace fsdpx {

// All fields but the tag's moment must be alike on all ranks.
struct Announcement {
  const char* operation = "";  // one of a fixed list, see comm_announcement.cpp
  Tag tag;
  Place place;
  int64_t nbytes = 0;
  int64_t num_used = 0;
  uint64_t details = 0;  // a hash of what else must agree: see details_of
};

// An announcement as it travels. The first word is a hash of what must be alike, the rest is for
// messages.
// Of a long unit name the end is kept.
inline constexpr int kUnitWords = 16;
inline constexpr int kAnnouncementWords = 7 + kUnitWords;
using AnnouncementWords = std::array<uint64_t, kAnnouncementWords>;

AnnouncementWords encode(const Announcement& announcement);
Announcement decode(const AnnouncementWords& words);  // `details` is not in there

// A hash that is alike in all processes.
class Hasher {
 public:
  void add(uint64_t value);
  void add(const std::string& text);
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

uint64_t details_of(const GatherOp& op);
uint64_t details_of(const ReduceOp& op);

std::string describe(const Announcement& announcement);
std::string describe_briefly(const Announcement& announcement);
std::string desync_message(uint64_t sequence, int rank, const Announcement& mine, int peer,
                           const Announcement& theirs, const Announcement& last_alike);

// What to tell a user about ranks that went apart: where they were together last, and the way on.
std::string last_alike(const Announcement& last);
inline constexpr const char* kWayOn =
    " To go on after this error, call reset_iter_state() on the sharded model on all ranks (or "
    "close() on the communicator).";

}  // namespace fsdpx
