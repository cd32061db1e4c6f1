#include "shm_exchange.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "check.h"

namespace fsdpx {
namespace {

constexpr size_t kTokenChars = 32;

struct Greeting {
  char token[kTokenChars];  // of the one who listens
  int32_t rank;             // of the one who calls
};

// Waits until the socket is ready. Throws CommTimeout, naming what was waited for.
void wait_ready(int fd, short events, Deadline deadline, const std::string& what) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd entry = {fd, events, 0};
    const int limit = static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1'000'000));
    const int num_ready = poll(&entry, 1, limit);
    if (num_ready > 0) return;
    if (num_ready < 0 && errno != EINTR) throw_errno("poll");
    check<CommTimeout>(left.count() > 0, "time limit passed while waiting for ", what);
  }
}

sockaddr_un address_of(const std::string& name, socklen_t* length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero: abstract
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

int new_socket() {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) throw_errno("no Unix socket");
  return fd;
}

bool same_user(int fd) {
  ucred credentials = {};
  socklen_t length = sizeof(credentials);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
         credentials.uid == geteuid();
}

// One small message, with a descriptor if `fd` >= 0.
void send_message(int socket, const void* data, size_t nbytes, int fd, Deadline deadline) {
  iovec part = {const_cast<void*>(data), nbytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  while (sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
    if (errno != EAGAIN && errno != EINTR) throw_errno("can't send to another rank");
    wait_ready(socket, POLLOUT, deadline, "another rank to take a message");
  }
}

// Returns the descriptor that came along, or -1. Throws when the peer is gone.
int receive_message(int socket, void* data, size_t nbytes, Deadline deadline,
                    const std::string& from) {
  iovec part = {data, nbytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received;
  while ((received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0) {
    if (errno != EAGAIN && errno != EINTR) throw_errno("can't receive from " + from);
    wait_ready(socket, POLLIN, deadline, from);
  }
  int fd = -1;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS)
    std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  if (received != static_cast<ssize_t>(nbytes)) {
    if (fd >= 0) close(fd);
    check<std::runtime_error>(received != 0, from, " has left");
    check<std::runtime_error>(false, "a message of ", received, " bytes from ", from);
  }
  return fd;
}

}  // namespace

SocketExchange::SocketExchange() : name_("fsdpx-" + random_token()), token_(random_token()) {
  listener_ = new_socket();
  socklen_t length;
  const sockaddr_un address = address_of(name_, &length);
  if (bind(listener_, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener_, 4096) != 0) {
    const int error = errno;
    close();
    errno = error;
    throw_errno("can't listen on a Unix socket");
  }
}

SocketExchange::~SocketExchange() { close(); }

std::string SocketExchange::address() const { return name_ + "/" + token_; }

void SocketExchange::call(int peer, const std::string& address, Deadline deadline) {
  const size_t slash = address.find('/');
  check<std::runtime_error>(slash != std::string::npos, "rank ", peer, " sent no socket address");
  const std::string token = address.substr(slash + 1);
  socklen_t length;
  const sockaddr_un where = address_of(address.substr(0, slash), &length);
  const int fd = sockets_[peer] = new_socket();
  while (::connect(fd, reinterpret_cast<const sockaddr*>(&where), length) != 0) {
    if (errno != EAGAIN && errno != EINTR)
      throw_errno(detail::concat("can't reach the socket of rank ", peer));
    check<CommTimeout>(std::chrono::steady_clock::now() < deadline, "rank ", peer,
                       " did not answer on its socket");
    usleep(1000);
  }
  check<std::runtime_error>(same_user(fd), "rank ", peer, " is of another user");
  Greeting greeting = {};
  std::memcpy(greeting.token, token.data(), std::min(token.size(), kTokenChars));
  greeting.rank = rank_;
  send_message(fd, &greeting, sizeof(greeting), -1, deadline);
}

// Takes one call. False if it was a stranger's.
bool SocketExchange::answer(Deadline deadline) {
  wait_ready(listener_, POLLIN, deadline, "the calls of higher ranks");
  const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return false;
  Greeting greeting = {};
  bool known = false;
  try {
    known = same_user(fd) &&
            receive_message(fd, &greeting, sizeof(greeting), deadline, "a caller") == -1 &&
            std::memcmp(greeting.token, token_.data(), kTokenChars) == 0 && greeting.rank > rank_ &&
            greeting.rank < static_cast<int>(sockets_.size()) && sockets_[greeting.rank] == -1;
  } catch (const std::runtime_error&) {
    known = false;
  }
  if (known) {
    sockets_[greeting.rank] = fd;
  } else {
    ::close(fd);
  }
  return known;
}

void SocketExchange::connect(int rank, const std::vector<std::string>& addresses,
                             Deadline deadline) {
  rank_ = rank;
  sockets_.assign(addresses.size(), -1);
  for (int peer = 0; peer < rank; ++peer) call(peer, addresses[peer], deadline);
  for (int missing = static_cast<int>(addresses.size()) - rank - 1; missing > 0;)
    missing -= answer(deadline) ? 1 : 0;
  ::close(std::exchange(listener_, -1));
}

std::shared_ptr<Mapping> SocketExchange::make(int64_t nbytes) {
  return Mapping::make_anonymous(nbytes);
}

void SocketExchange::offer(const Mapping& own, Deadline deadline) {
  const int64_t nbytes = own.nbytes();
  for (int fd : sockets_)
    if (fd >= 0) send_message(fd, &nbytes, sizeof(nbytes), own.fd(), deadline);
}

std::shared_ptr<Mapping> SocketExchange::take(int rank, int64_t nbytes, Deadline deadline) {
  const std::string from = detail::concat("rank ", rank);
  int64_t offered = 0;
  const int fd = receive_message(sockets_[rank], &offered, sizeof(offered), deadline, from);
  check<std::runtime_error>(fd >= 0, from, " sent no memory");
  std::shared_ptr<Mapping> mapping;
  try {
    check<DesyncError>(offered == nbytes, from, " allocates ", offered, " bytes, this rank ",
                       nbytes);
    mapping = Mapping::map(fd, nbytes);
  } catch (...) {
    ::close(fd);
    throw;
  }
  ::close(fd);
  return mapping;
}

void SocketExchange::finish(Mapping& own) { own.close_fd(); }

bool SocketExchange::alive(int rank) {
  pollfd entry = {sockets_[rank], POLLRDHUP, 0};
  if (entry.fd < 0 || poll(&entry, 1, 0) <= 0) return true;
  return (entry.revents & (POLLHUP | POLLRDHUP | POLLERR)) == 0;
}

void SocketExchange::close() {
  if (listener_ >= 0) ::close(std::exchange(listener_, -1));
  for (int& fd : sockets_) {
    if (fd < 0) continue;
    if (getpid() == pid_) shutdown(fd, SHUT_RDWR);  // also where a forked child holds a copy
    ::close(std::exchange(fd, -1));
  }
}

NamedExchange::NamedExchange() : token_(random_token()) {}

NamedExchange::~NamedExchange() { close(); }

void NamedExchange::connect(int, const std::vector<std::string>& addresses) { tokens_ = addresses; }

std::string NamedExchange::name(const std::string& token) const {
  return detail::concat("/fsdpx-", token, "-", num_made_);
}

std::shared_ptr<Mapping> NamedExchange::make(int64_t nbytes) {
  ++num_made_;  // alike on all ranks
  auto mapping = Mapping::make_named(name(token_), nbytes);
  linked_ = true;
  mapping->close_fd();
  return mapping;
}

void NamedExchange::offer(const Mapping&, Deadline) {}

std::shared_ptr<Mapping> NamedExchange::take(int rank, int64_t nbytes, Deadline) {
  return Mapping::open_named(name(tokens_[rank]), nbytes);
}

void NamedExchange::finish(Mapping&) {
  if (std::exchange(linked_, false)) Mapping::unlink(name(token_));
}

bool NamedExchange::alive(int) { return true; }  // only time limits tell

void NamedExchange::close() {
  if (std::exchange(linked_, false)) Mapping::unlink(name(token_));
}

}  // namespace fsdpx
