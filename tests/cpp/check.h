// A minimal test harness. A test program is one file that includes this header once:
//
//   TEST(cast_rounds_to_even) { CHECK_EQ(cast(1.5f), 2); }
//
// `program [words...]` runs the tests whose names contain one of the words (all without words) and
// exits with 1 when a check failed or nothing ran.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace fsdpx::test {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  ++failures();
}

template <typename T>
std::string show(const T& value) {
  if constexpr (requires(std::ostringstream& out) { out << value; }) {
    std::ostringstream out;
    out.precision(17);
    out << value;
    return out.str();
  } else {
    return "(value)";
  }
}

template <typename A, typename B>
void check_equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!(a == b)) {
    fail(file, line, std::string(text) + " failed: " + show(a) + " != " + show(b));
  }
}

// Runs `body`, which must throw `Error` with a message that contains `part`.
template <typename Error>
void check_throws(const char* file, int line, const char* part, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    if (std::strstr(error.what(), part) == nullptr) {
      fail(file, line, std::string("the message lacks \"") + part + "\": \"" + error.what() + "\"");
    }
    return;
  } catch (const std::exception& error) {
    fail(file, line, std::string("threw another type of error: ") + error.what());
    return;
  }
  fail(file, line, std::string("did not throw an error about \"") + part + "\"");
}

inline bool chosen(const Case& test, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strstr(test.name, argv[i]) != nullptr) return true;
  }
  return argc <= 1;
}

inline int run_all(int argc, char** argv) {
  int num_run = 0;
  for (const Case& test : cases()) {
    if (!chosen(test, argc, argv)) continue;
    const int before = failures();
    try {
      test.run();
    } catch (const std::exception& error) {
      fail(test.name, 0, std::string("unexpected error: ") + error.what());
    }
    ++num_run;
    std::printf("%-6s %s\n", failures() == before ? "ok" : "FAILED", test.name);
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed checks\n", num_run, failures());
  return failures() == 0 && num_run > 0 ? 0 : 1;
}

}  // namespace fsdpx::test

#define TEST(name)                                                          \
  static void test_##name();                                                \
  static const ::fsdpx::test::Register register_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) ::fsdpx::test::fail(__FILE__, __LINE__, #condition " failed"); \
  } while (false)

#define CHECK_EQ(a, b) \
  ::fsdpx::test::check_equal(__FILE__, __LINE__, "CHECK_EQ(" #a ", " #b ")", (a), (b))

#define CHECK_THROWS(Error, part, ...) \
  ::fsdpx::test::check_throws<Error>(__FILE__, __LINE__, part, [&] { __VA_ARGS__; })

int main(int argc, char** argv) { return ::fsdpx::test::run_all(argc, argv); }
