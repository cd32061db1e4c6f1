// Looks after collectives that run on a GPU: nothing on the host waits for them.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "../stream.h"

namespace fsdpx::cuda {

class Watchdog {
  struct State;

 public:
  // Calls, on a thread of its own for `device`, `on_failure` with a message when a watched event
  // has not come within `limit` seconds, or when `problem` returns one. Once; then it ends.
  Watchdog(int device, double limit, std::function<std::string()> problem,
           std::function<void(const std::string&)> on_failure);
  ~Watchdog();  // stops, without waiting
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Events are watched in the order in which they end. The thread starts with the first.
  void watch(std::shared_ptr<Event> event, std::string what);

  // A call that this thread makes until the object goes: it may hang before there is an event.
  class Call {
   public:
    Call(Watchdog& watchdog, std::string what);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    const std::shared_ptr<State> state_;
  };

  void stop();  // and waits for the thread; not from `on_failure`

 private:
  std::shared_ptr<State> state_;
};

}  // namespace fsdpx::cuda
