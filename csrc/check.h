// Errors of the native core. Messages name what was wrong and what to do; the bindings turn each
// type into its Python counterpart.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fsdpx {

// A caller's mistake: becomes ValueError.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Ranks that do different things: becomes fsdpx.DesyncError.
struct DesyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A wait that passed its limit: becomes fsdpx.CommTimeout.
struct CommTimeout : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace detail {
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// An error's message without the prefix that `check` puts before it, for use in another message.
inline std::string bare(const std::exception& error) {
  const std::string text = error.what();
  constexpr const char* kPrefix = "fsdpx: ";
  return text.starts_with(kPrefix) ? text.substr(std::char_traits<char>::length(kPrefix)) : text;
}

// What `body` throws, in words; empty if it throws nothing.
template <typename Body>
std::string problem_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return bare(error);
  }
  return {};
}
}  // namespace detail

// Throws `Error` with the concatenated parts when `ok` is false.
template <typename Error = InvalidArgument, typename... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) throw Error(detail::concat("fsdpx: ", parts...));
}

}  // namespace fsdpx
