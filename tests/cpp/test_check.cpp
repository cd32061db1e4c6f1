// The core's error helper, and the harness that all C++ tests stand on.
#include "../../csrc/check.h"
#include "check.h"

using fsdpx::check;
using fsdpx::CommTimeout;
using fsdpx::InvalidArgument;

TEST(check_passes_quietly) { check(true, "never shown"); }

TEST(check_joins_the_parts_of_its_message) {
  CHECK_THROWS(InvalidArgument, "fsdpx: unit 3 has -1 bytes",
               check(false, "unit ", 3, " has ", -1, " bytes"));
}

TEST(check_throws_the_named_type) {
  CHECK_THROWS(CommTimeout, "rank 1", check<CommTimeout>(false, "rank ", 1, " is late"));
}

TEST(a_failed_check_counts) {
  const int before = fsdpx::test::failures();
  CHECK_EQ(1, 2);
  CHECK(false);
  CHECK_THROWS(InvalidArgument, "nothing", (void)0);
  CHECK_THROWS(InvalidArgument, "one thing", check(false, "another"));
  const int counted = fsdpx::test::failures() - before;
  fsdpx::test::failures() = before;
  CHECK_EQ(counted, 4);
}
