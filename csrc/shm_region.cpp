#include "shm_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "check.h"

namespace fsdpx {

Deadline deadline_after(double seconds) {
  constexpr double kLongest = 10.0 * 365 * 24 * 3600;
  const double limit = seconds < kLongest ? std::max(seconds, 0.0) : kLongest;
  return std::chrono::steady_clock::now() + std::chrono::nanoseconds(int64_t(limit * 1e9));
}

void throw_errno(const std::string& what) {
  throw std::runtime_error("fsdpx: " + what + ": " + std::strerror(errno));
}

std::string random_token() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) throw_errno("no random numbers");
  std::string token;
  for (unsigned char byte : bytes) {
    token += "0123456789abcdef"[byte >> 4];
    token += "0123456789abcdef"[byte & 15];
  }
  return token;
}

std::shared_ptr<Mapping> Mapping::make_private(int64_t nbytes) {
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw_errno(detail::concat("can't allocate ", nbytes, " bytes"));
  return std::shared_ptr<Mapping>(new Mapping(data, nbytes, -1));
}

std::shared_ptr<Mapping> Mapping::map(int fd, int64_t nbytes) {
  struct stat status;
  if (fstat(fd, &status) != 0) throw_errno("can't inspect shared memory");
  check<std::runtime_error>(status.st_size >= nbytes, "shared memory of a peer has ",
                            status.st_size, " bytes, not ", nbytes);
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw_errno(detail::concat("can't map ", nbytes, " bytes"));
  return std::shared_ptr<Mapping>(new Mapping(data, nbytes, -1));
}

// Takes the descriptor over, also on failure.
std::shared_ptr<Mapping> Mapping::reserve(int fd, int64_t nbytes, const char* what) {
  const int error = posix_fallocate(fd, 0, nbytes);
  if (error != 0) {
    close(fd);
    errno = error;
    throw_errno(detail::concat("can't reserve ", nbytes, " bytes of ", what));
  }
  std::shared_ptr<Mapping> mapping;
  try {
    mapping = map(fd, nbytes);
  } catch (...) {
    close(fd);
    throw;
  }
  mapping->fd_ = fd;
  // First touch by the owner puts the pages on its memory node.
  std::memset(mapping->data_, 0, nbytes);
  return mapping;
}

std::shared_ptr<Mapping> Mapping::make_anonymous(int64_t nbytes) {
  const int fd = memfd_create("fsdpx", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_errno("memfd_create");
  auto mapping = reserve(fd, nbytes, "shared memory");
  fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);  // no SIGBUS by a late resize
  return mapping;
}

std::shared_ptr<Mapping> Mapping::make_named(const std::string& name, int64_t nbytes) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) throw_errno("shm_open of '" + name + "'");
  try {
    return reserve(fd, nbytes, "/dev/shm");
  } catch (...) {
    unlink(name);
    throw;
  }
}

std::shared_ptr<Mapping> Mapping::open_named(const std::string& name, int64_t nbytes) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) throw_errno("shm_open of '" + name + "'");
  std::shared_ptr<Mapping> mapping;
  try {
    struct stat status;
    const bool ours = fstat(fd, &status) == 0 && status.st_uid == geteuid();
    check<std::runtime_error>(ours, "shared memory '", name, "' belongs to another user");
    mapping = map(fd, nbytes);
  } catch (...) {
    close(fd);
    throw;
  }
  close(fd);
  return mapping;
}

void Mapping::unlink(const std::string& name) noexcept { shm_unlink(name.c_str()); }

void Mapping::close_fd() noexcept {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Mapping::~Mapping() {
  close_fd();
  munmap(data_, nbytes_);
}

}  // namespace fsdpx
