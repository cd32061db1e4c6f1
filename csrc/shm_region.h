// Memory that processes of one host share, and how they come to share it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdpx {

using Deadline = std::chrono::steady_clock::time_point;

// A time limit as a point in time; limits beyond ten years count as ten years.
Deadline deadline_after(double seconds);

// Mapped memory. The mapping ends with the object; the memory itself ends with the last mapping of
// any process, also when processes are killed.
class Mapping {
 public:
  // `nbytes` > 0 of zeroed memory of this process alone.
  static std::shared_ptr<Mapping> make_private(int64_t nbytes);
  // Zeroed memory behind a new descriptor, reserved (a full memory file system is an error here,
  // not a signal later) and touched by the caller.
  static std::shared_ptr<Mapping> make_anonymous(int64_t nbytes);
  // The same behind a name that other processes of this user can open until `unlink`.
  static std::shared_ptr<Mapping> make_named(const std::string& name, int64_t nbytes);

  // Maps what a peer made. The descriptor stays the caller's.
  static std::shared_ptr<Mapping> map(int fd, int64_t nbytes);
  static std::shared_ptr<Mapping> open_named(const std::string& name, int64_t nbytes);
  static void unlink(const std::string& name) noexcept;

  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }
  int fd() const { return fd_; }  // -1 unless this process made the memory and has not closed it
  void close_fd() noexcept;

 private:
  Mapping(void* data, int64_t nbytes, int fd) : data_(data), nbytes_(nbytes), fd_(fd) {}
  static std::shared_ptr<Mapping> reserve(int fd, int64_t nbytes, const char* what);
  void* data_;
  int64_t nbytes_;
  int fd_;
};

// How one rank's memory reaches its peers. Calls are collective: rank r's nth call meets the nth
// call of the others.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // Makes `nbytes` of zeroed memory that peers can map.
  virtual std::shared_ptr<Mapping> make(int64_t nbytes) = 0;
  // Before peers map `own`, after all have made theirs: whatever helps them find it.
  virtual void offer(const Mapping& own, Deadline deadline) = 0;
  // Maps what peer `rank` offered.
  virtual std::shared_ptr<Mapping> take(int rank, int64_t nbytes, Deadline deadline) = 0;
  // After all have mapped all: nothing may remain that outlives the processes.
  virtual void finish(Mapping& own) = 0;
  // False once it is known that the peer's process has ended.
  virtual bool alive(int rank) = 0;
  virtual void close() = 0;
};

std::string random_token();  // 32 hexadecimal digits that cannot be guessed
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace fsdpx
