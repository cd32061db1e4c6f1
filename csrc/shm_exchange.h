// The ways in which shared memory travels between the ranks of one host.
#pragma once

#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "shm_region.h"

namespace fsdpx {

// Descriptors sent over Unix sockets, one between each two ranks. The sockets have names in the
// abstract namespace, so they leave nothing behind; a peer must be of the same user and know the
// token that ranks tell each other through the process group.
class SocketExchange final : public Exchange {
 public:
  SocketExchange();  // listens from here on
  ~SocketExchange() override;

  std::string address() const;  // what peers need
  void connect(int rank, const std::vector<std::string>& addresses, Deadline deadline);

  std::shared_ptr<Mapping> make(int64_t nbytes) override;
  void offer(const Mapping& own, Deadline deadline) override;
  std::shared_ptr<Mapping> take(int rank, int64_t nbytes, Deadline deadline) override;
  void finish(Mapping& own) override;
  bool alive(int rank) override;
  void close() override;

 private:
  void call(int peer, const std::string& address, Deadline deadline);
  bool answer(Deadline deadline);

  const int pid_ = getpid();
  const std::string name_;
  const std::string token_;
  int listener_ = -1;
  int rank_ = 0;
  std::vector<int> sockets_;  // by rank; -1 for this one
};

// Names in /dev/shm, for ranks that can't reach each other's sockets. A name can't be guessed and
// is gone as soon as all have mapped it.
class NamedExchange final : public Exchange {
 public:
  NamedExchange();

  std::string address() const { return token_; }
  void connect(int rank, const std::vector<std::string>& addresses);

  std::shared_ptr<Mapping> make(int64_t nbytes) override;
  void offer(const Mapping& own, Deadline deadline) override;
  std::shared_ptr<Mapping> take(int rank, int64_t nbytes, Deadline deadline) override;
  void finish(Mapping& own) override;
  bool alive(int rank) override;
  void close() override;
  ~NamedExchange() override;

 private:
  std::string name(const std::string& token) const;
  const std::string token_;
  std::vector<std::string> tokens_;
  int64_t num_made_ = 0;
  bool linked_ = false;
};

// For one rank alone: memory of this process.
class PrivateExchange final : public Exchange {
 public:
  std::shared_ptr<Mapping> make(int64_t nbytes) override { return Mapping::make_private(nbytes); }
  void offer(const Mapping&, Deadline) override {}
  std::shared_ptr<Mapping> take(int, int64_t nbytes, Deadline) override { return make(nbytes); }
  void finish(Mapping&) override {}
  bool alive(int) override { return true; }
  void close() override {}
};

}  // namespace fsdpx
