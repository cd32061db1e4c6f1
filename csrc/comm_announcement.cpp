#include "comm_announcement.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "check.h"

namespace fsdpx {
namespace {

constexpr const char* kOperations[] = {
    "nothing",    "connect",        "allocate",   "allocate a send buffer",
    "all_gather", "reduce_scatter", "all_reduce", "barrier"};

uint64_t operation_index(const char* name) {
  for (size_t i = 0; i < std::size(kOperations); ++i)
    if (std::strcmp(kOperations[i], name) == 0) return i;
  throw InvalidArgument(detail::concat("fsdpx: unknown operation '", name, "'"));
}

uint64_t check_word(const Announcement& a) {
  Hasher hasher;
  hasher.add(operation_index(a.operation));
  hasher.add(a.tag.unit);
  for (uint64_t value : {uint64_t(a.place.region), uint64_t(a.place.offset), uint64_t(a.nbytes),
                         uint64_t(a.num_used), a.details})
    hasher.add(value);
  return hasher.value();
}

uint64_t word_of(const Moment& moment) {
  return uint64_t(moment.step) << 32 | uint64_t(moment.forward) << 8 | uint64_t(moment.phase);
}

Moment moment_of(uint64_t word) {
  return {static_cast<uint32_t>(word >> 32), static_cast<uint16_t>(word >> 8),
          static_cast<Moment::Phase>(word & 3)};
}

// " in forward 2 of step 5", or nothing.
std::string describe_moment(const Moment& m) {
  const auto forward = detail::concat("forward ", m.forward, " of step ", m.step);
  switch (m.phase) {
    case Moment::kForward:
      return " in " + forward;
    case Moment::kBackward:
      return detail::concat(" in backward of step ", m.step);
    case Moment::kBetween:
      return m.forward > 0 ? " after " + forward : detail::concat(" before step ", m.step);
    case Moment::kNone:
      break;
  }
  return "";
}

}  // namespace

// FNV-1a over the bytes.
void Hasher::add(uint64_t value) {
  for (int i = 0; i < 8; ++i) hash_ = (hash_ ^ ((value >> (8 * i)) & 255)) * 0x100000001b3;
}

void Hasher::add(const std::string& text) {
  for (unsigned char c : text) hash_ = (hash_ ^ c) * 0x100000001b3;
  add(text.size());
}

uint64_t details_of(const GatherOp& op) {
  Hasher hasher;
  hasher.add(op.contents);
  for (const GatherSegment& s : op.segments)
    for (uint64_t value : {uint64_t(s.numel), uint64_t(s.dst_offset), uint64_t(s.dst_dtype)})
      hasher.add(value);
  return hasher.value();
}

uint64_t details_of(const ReduceOp& op) {
  Hasher hasher;
  for (const ReduceSegment& s : op.segments)
    for (uint64_t value : {uint64_t(s.numel), uint64_t(s.wire_dtype)}) hasher.add(value);
  return hasher.value();
}

AnnouncementWords encode(const Announcement& a) {
  AnnouncementWords words = {check_word(a),
                             operation_index(a.operation),
                             uint64_t(a.place.region),
                             uint64_t(a.place.offset),
                             uint64_t(a.nbytes),
                             uint64_t(a.num_used),
                             word_of(a.tag.moment)};
  char unit[kUnitWords * 8] = {};
  const size_t length = std::min(a.tag.unit.size(), sizeof(unit) - 1);
  std::memcpy(unit, a.tag.unit.data() + a.tag.unit.size() - length, length);
  std::memcpy(words.data() + 7, unit, sizeof(unit));
  return words;
}

Announcement decode(const AnnouncementWords& words) {
  char unit[kUnitWords * 8];
  std::memcpy(unit, words.data() + 7, sizeof(unit));
  unit[sizeof(unit) - 1] = 0;
  Announcement a;
  a.operation = words[1] < std::size(kOperations) ? kOperations[words[1]] : kOperations[0];
  a.tag = {unit, moment_of(words[6])};
  a.place = {int64_t(words[2]), int64_t(words[3])};
  a.nbytes = int64_t(words[4]);
  a.num_used = int64_t(words[5]);
  return a;
}

std::string describe_briefly(const Announcement& a) {
  return detail::concat(a.operation, " of unit '", a.tag.unit, "'", describe_moment(a.tag.moment));
}

std::string describe(const Announcement& a) {
  return detail::concat(describe_briefly(a), " (", a.nbytes, " bytes, place ", a.place.region, ":",
                        a.place.offset,
                        a.num_used > 0 ? detail::concat(", ", a.num_used, " parameters") : "", ")");
}

std::string desync_message(uint64_t sequence, int rank, const Announcement& mine, int peer,
                           const Announcement& theirs, const Announcement& last) {
  Announcement at_the_same_time = theirs;
  at_the_same_time.tag.moment = mine.tag.moment;
  const bool same = describe(mine) == describe(at_the_same_time);
  return detail::concat("fsdpx: collective ", sequence, " differs between ranks: rank ", rank,
                        " does ", describe(mine), ", rank ", peer, " does ", describe(theirs),
                        same ? ", with other dtypes, sizes, or parameters (names, shapes, "
                               "requires_grad)"
                             : "",
                        ".", last_alike(last),
                        " All ranks must run the same units in the same order: look for a branch, "
                        "a loop or a caught exception that depends on the rank.",
                        kWayOn);
}

std::string last_alike(const Announcement& last) {
  if (*last.operation == 0) return "";
  return detail::concat(" The last that all did alike was ", describe_briefly(last), ".");
}

}  // namespace fsdpx
