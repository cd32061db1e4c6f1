// Python's view of streams, events, the recorder and communicators. Pointers and dtypes come as
// integers; fsdpx.comm checks them.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <memory>
#include <tuple>

#include "bind_cuda.h"
#include "check.h"
#include "comm_queue.h"
#include "exchange_communicator.h"
#include "shm_communicator.h"
#include "worker_stream.h"

namespace py = pybind11;

namespace fsdpx {
namespace {

using std::shared_ptr;

bool python_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void set_python_error(const char* name, const char* message) {
  const py::object type = py::module_::import("fsdpx.errors").attr(name);
  PyErr_SetString(type.ptr(), message);
}

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const DesyncError& e) {
    set_python_error("DesyncError", e.what());
  } catch (const CommTimeout& e) {
    set_python_error("CommTimeout", e.what());
  }
}

struct GatherPlan {
  std::string unit;
  std::vector<GatherSegment> segments;
  uint64_t contents;
};

using GatherRow = std::tuple<uintptr_t, int, int64_t, int64_t, int>;

GatherPlan make_plan(std::string unit, const std::vector<GatherRow>& rows, uint64_t contents) {
  GatherPlan plan{std::move(unit), {}, contents};
  for (const auto& [shard, shard_dtype, numel, offset, dtype] : rows)
    plan.segments.push_back({pointer<const void>(shard), static_cast<DType>(shard_dtype), numel,
                             offset, static_cast<DType>(dtype)});
  return plan;
}

shared_ptr<Event> all_gather(shared_ptr<Communicator> comm, Stream& stream, const GatherPlan& plan,
                             int64_t region, int64_t offset, Recorder* recorder,
                             py::object keep_alive) {
  auto op = std::make_shared<GatherOp>(
      GatherOp{{plan.unit, comm->moment()}, {region, offset}, plan.segments, plan.contents});
  auto kept = keep(std::move(keep_alive));
  const py::gil_scoped_release nogil;  // as in reduce_scatter
  return issue_all_gather(stream, std::move(comm), std::move(op), recorder, std::move(kept));
}

using SpanRow = std::tuple<uintptr_t, int64_t, int64_t>;

ReduceSegment make_reduce_segment(const std::vector<SpanRow>& grads, int grad_dtype, int wire_dtype,
                                  int64_t numel, uintptr_t shard, int shard_dtype, double scale,
                                  bool accumulate) {
  ReduceSegment segment{{},
                        static_cast<DType>(grad_dtype),
                        static_cast<DType>(wire_dtype),
                        numel,
                        pointer<void>(shard),
                        static_cast<DType>(shard_dtype),
                        scale,
                        accumulate};
  for (const auto& [data, count, offset] : grads)
    segment.grads.push_back({pointer<const void>(data), count, offset});
  return segment;
}

shared_ptr<Event> reduce_scatter(shared_ptr<Communicator> comm, Stream& stream,
                                 shared_ptr<ReduceOp> op, Recorder* recorder,
                                 py::object keep_alive) {
  auto kept = keep(std::move(keep_alive));
  const py::gil_scoped_release nogil;  // on a GPU the task runs here, and launches may wait
  return issue_reduce_scatter(stream, std::move(comm), std::move(op), std::move(kept), recorder);
}

shared_ptr<Event> all_reduce(shared_ptr<Communicator> comm, Stream& stream, std::string unit,
                             uintptr_t data, int dtype, int64_t numel, double scale,
                             Recorder* recorder, py::object keep_alive) {
  AllReduceOp op{{std::move(unit), comm->moment()},
                 pointer<void>(data),
                 static_cast<DType>(dtype),
                 numel,
                 scale};
  auto kept = keep(std::move(keep_alive));
  const py::gil_scoped_release nogil;
  return issue_all_reduce(stream, std::move(comm), std::move(op), std::move(kept), recorder);
}

shared_ptr<Event> barrier(shared_ptr<Communicator> comm, Stream& stream, std::string name) {
  const py::gil_scoped_release nogil;
  auto event =
      stream.enqueue([comm, tag = Tag{std::move(name), comm->moment()}] { comm->barrier(tag); });
  comm->note_issued(event);
  return event;
}

// The bytes of a region as a Python buffer, which keeps the communicator (and so the memory) alive.
struct RegionView {
  shared_ptr<Communicator> comm;
  void* data;
  int64_t nbytes;
};

py::list take(Recorder& recorder) {
  std::vector<TraceEvent> events;
  {
    const py::gil_scoped_release nogil;
    events = recorder.take();
  }
  py::list rows;
  for (const TraceEvent& e : events)
    rows.append(py::make_tuple(e.lane, e.unit, e.operation, e.issue.ns, e.begin.ns, e.end.ns,
                               e.wire_bytes));
  return rows;
}

void bind_recorder(py::module_& m) {
  py::class_<Instant>(m, "Instant", "A point in time; on a GPU it may lie ahead.")
      .def(py::init<int64_t>(), py::arg("ns"));
  py::implicitly_convertible<int64_t, Instant>();
  py::class_<Recorder, shared_ptr<Recorder>>(m, "Recorder")
      .def(py::init<>())
      .def_property_readonly("enabled", &Recorder::enabled)
      .def("enable", &Recorder::enable, py::arg("on"))
      .def(
          "record",
          [](Recorder& recorder, const std::string& lane, std::string unit, std::string operation,
             const Instant& issue, const Instant& begin, const Instant& end, int64_t wire_bytes) {
            const char* lane_name = lane == "compute" ? "compute"
                                    : lane == "comm"  ? "comm"
                                                      : "resident";
            recorder.record(
                {lane_name, std::move(unit), std::move(operation), issue, begin, end, wire_bytes});
          },
          py::arg("lane"), py::arg("unit"), py::arg("operation"), py::arg("issue"),
          py::arg("begin"), py::arg("end"), py::arg("wire_bytes") = 0,
          "Times are instants, or nanoseconds of now_ns().")
      .def("take", &take,
           "Events so far as (lane, unit, operation, issue_ns, begin_ns, end_ns, wire_bytes).");
  m.def("now_ns", &now_ns, "The recorder's clock.");
}

void bind_streams(py::module_& m) {
  py::class_<Event, shared_ptr<Event>>(m, "Event")
      .def("query", &Event::query, "True when the task has ended, well or not.")
      .def("wait", &wait_for, py::arg("seconds"),
           "What the caller does next may use the results; raises what the task raised. On CPU it "
           "waits, without the GIL; on a GPU torch's current stream will.")
      .def("ended_within", &Event::ended_within, py::arg("seconds"),
           py::call_guard<py::gil_scoped_release>(), "The calling thread waits for the end.");
  py::class_<Stream, shared_ptr<Stream>>(m, "Stream")
      .def(
          "enqueue",
          [](Stream& stream, py::function task) {
            auto held = keep(std::move(task));
            return stream.enqueue([held] {
              py::gil_scoped_acquire gil;
              try {
                (*static_cast<py::object*>(held.get()))();
              } catch (const py::error_already_set& error) {
                throw std::runtime_error(error.what());
              }
            });
          },
          py::arg("task"), "Runs a Python callable after what was enqueued before.")
      .def("mark", &Stream::mark, "The end of what the caller has computed; None on CPU.")
      .def("marks_of_users", &Stream::marks_of_users, py::arg("event"),
           "Marks of the caller's stream and of those that have waited for `event`; on CPU none.")
      .def(
          "follow",
          [](Stream& stream, const Event* mark) {
            if (mark != nullptr) stream.follow(*mark);
          },
          py::arg("mark").none(true), "What is enqueued from now on begins after `mark`.")
      .def(
          "reached", [](Stream& stream) { return stream.clock()(); },
          "The instant at which what is enqueued so far has run.")
      .def("computed", &Stream::computed,
           "The instant at which the caller has computed what it has issued so far.")
      .def("close", &Stream::close, py::arg("seconds"), py::call_guard<py::gil_scoped_release>());
  py::class_<WorkerStream, Stream, shared_ptr<WorkerStream>>(m, "WorkerStream")
      .def(py::init<std::string>(), py::arg("name"));
}

void bind_operations(py::module_& m) {
  py::class_<GatherPlan, shared_ptr<GatherPlan>>(m, "GatherPlan")
      .def(py::init(&make_plan), py::arg("unit"), py::arg("segments"), py::arg("contents") = 0,
           "Segments: (shard pointer, shard dtype, numel, byte offset in the place, dtype there). "
           "Contents: a hash of what lies in them.")
      .def_readonly("unit", &GatherPlan::unit);
  py::class_<ReduceSegment>(m, "ReduceSegment")
      .def(py::init(&make_reduce_segment), py::arg("grads"), py::arg("grad_dtype"),
           py::arg("wire_dtype"), py::arg("numel"), py::arg("shard"), py::arg("shard_dtype"),
           py::arg("scale") = 1.0, py::arg("accumulate") = false,
           "Gradients: (pointer or 0 for zeros, numel, element offset in the flat segment).");
  py::class_<ReduceOp, shared_ptr<ReduceOp>>(m, "ReduceOp")
      .def(py::init([](std::string unit, std::vector<ReduceSegment> segments,
                       std::vector<uint8_t> used) {
             return ReduceOp{{std::move(unit)}, std::move(segments), std::move(used), nullptr};
           }),
           py::arg("unit"), py::arg("segments"), py::arg("used") = std::vector<uint8_t>())
      .def_property_readonly("used", &used_on_any_rank);
}

void bind_communicator(py::module_& m) {
  const auto nogil = py::call_guard<py::gil_scoped_release>();
  py::class_<RegionView>(m, "RegionView", py::buffer_protocol()).def_buffer([](RegionView& view) {
    return py::buffer_info(static_cast<uint8_t*>(view.data), view.nbytes);
  });
  py::class_<Communicator, shared_ptr<Communicator>>(m, "Communicator")
      .def_property_readonly("kind", &Communicator::kind)
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def("allocate", &allocate_in_order, py::arg("nbytes"), nogil,
           "After all collectives issued so far.")
      .def("region_data",
           [](Communicator& comm, int64_t region) {
             return reinterpret_cast<uintptr_t>(comm.region_data(region));
           })
      .def("region_view",
           [](shared_ptr<Communicator> comm, int64_t region, int64_t nbytes) {
             void* data = comm->region_data(region);
             return RegionView{std::move(comm), data, nbytes};
           })
      .def("release", &Communicator::release, py::arg("region"), nogil)
      .def("all_gather", &all_gather, py::arg("stream"), py::arg("plan"), py::arg("region"),
           py::arg("offset"), py::arg("recorder") = nullptr, py::arg("keep_alive") = py::none())
      .def("reduce_scatter", &reduce_scatter, py::arg("stream"), py::arg("op"),
           py::arg("recorder") = nullptr, py::arg("keep_alive") = py::none())
      .def("all_reduce", &all_reduce, py::arg("stream"), py::arg("unit"), py::arg("data"),
           py::arg("dtype"), py::arg("numel"), py::arg("scale") = 1.0,
           py::arg("recorder") = nullptr, py::arg("keep_alive") = py::none())
      .def(
          "set_moment",
          [](Communicator& comm, uint32_t step, uint16_t forward, int phase) {
            comm.set_moment({step, forward, static_cast<Moment::Phase>(phase)});
          },
          py::arg("step"), py::arg("forward"), py::arg("phase"),
          "What the program does: phase 1 is forward, 2 backward, 3 neither. For messages.")
      .def(
          "leave_word",
          [](shared_ptr<Communicator> comm, Stream& stream, std::string text) {
            stream.enqueue([comm, text = std::move(text)] { comm->leave_word(text); });
          },
          py::arg("stream"), py::arg("text"), "What peers read that wait for this rank in vain.")
      .def("send_buffer_bytes", &Communicator::send_buffer_bytes, py::arg("wire_bytes"))
      .def("barrier", &barrier, py::arg("stream"), py::arg("name"))
      .def(
          "poison",
          [](Communicator& comm, uintptr_t data, int64_t nbytes) {
            comm.poison(pointer<void>(data), nbytes);
          },
          py::arg("data"), py::arg("nbytes"), nogil,
          "NaN into memory, after what the caller has issued.")
      .def("close", &Communicator::close, nogil);
}

// A Python callable (send address, recv address, nbytes) as a primitive. It runs on the worker
// thread and takes the GIL to issue.
ByteCollectives::Call byte_collective(py::function function) {
  auto held = keep(std::move(function));
  return [held](const void* send, void* recv, int64_t nbytes) {
    py::gil_scoped_acquire gil;
    try {
      (*static_cast<py::object*>(held.get()))(reinterpret_cast<uintptr_t>(send),
                                              reinterpret_cast<uintptr_t>(recv), nbytes);
    } catch (const py::error_already_set& error) {
      // Not as it is: it could not be destroyed without the GIL.
      const py::object timeout = py::module_::import("fsdpx.errors").attr("CommTimeout");
      const std::string message = py::str(error.value());
      if (error.matches(timeout)) throw CommTimeout(message);
      throw PeerFailure(message);
    }
  };
}

// Callables that only serve messages: what they raise is left out of those.
template <typename Result, typename... Args>
std::function<Result(Args...)> for_messages(py::function function) {
  auto held = keep(std::move(function));
  return [held](Args... args) -> Result {
    py::gil_scoped_acquire gil;
    try {
      return (*static_cast<py::object*>(held.get()))(args...).template cast<Result>();
    } catch (const py::error_already_set&) {
      return Result();
    }
  };
}

void bind_kinds(py::module_& m) {
  const auto nogil = py::call_guard<py::gil_scoped_release>();
  py::class_<ShmBootstrap>(m, "ShmBootstrap")
      .def(py::init<std::string>(), py::arg("way"))
      .def_property_readonly("address", &ShmBootstrap::address)
      .def(
          "connect",
          [](ShmBootstrap& self, int rank, const std::vector<std::string>& addresses,
             double timeout, int64_t max_send_bytes, double connect_timeout) {
            ShmOptions options{timeout, connect_timeout};
            if (max_send_bytes >= 0) options.max_send_bytes = max_send_bytes;
            return self.connect(rank, addresses, options);
          },
          py::arg("rank"), py::arg("addresses"), py::arg("timeout"), py::arg("max_send_bytes") = -1,
          py::arg("connect_timeout") = 60.0, nogil);
  m.def(
      "exchange_communicator",
      [](std::string kind, int rank, int size, py::function all_gather, py::function all_to_all,
         py::function tell, py::function ask) -> shared_ptr<Communicator> {
        return std::make_shared<ExchangeCommunicator>(
            std::move(kind), rank, size,
            ByteCollectives{byte_collective(std::move(all_gather)),
                            byte_collective(std::move(all_to_all)),
                            for_messages<void, uint64_t, const std::string&>(std::move(tell)),
                            for_messages<std::string, uint64_t>(std::move(ask))});
      },
      py::arg("kind"), py::arg("rank"), py::arg("size"), py::arg("all_gather"),
      py::arg("all_to_all"), py::arg("tell"), py::arg("ask"),
      "The collectives take (send address, recv address, bytes per rank), tell (sequence, text), "
      "ask "
      "(sequence).");
}

}  // namespace

shared_ptr<void> keep(py::object object) {
  if (object.is_none()) return nullptr;
  return {new py::object(std::move(object)), [](void* held) {
            if (python_is_ending()) return;
            py::gil_scoped_acquire gil;
            delete static_cast<py::object*>(held);
          }};
}

void wait_for(Event& event, double seconds) {
  py::gil_scoped_release nogil;
  event.wait(seconds, [] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
}

std::vector<uint8_t> used_on_any_rank(const ReduceOp& op) {
  if (op.used_late == nullptr) return op.used;
  wait_for(*op.used_late->known, std::numeric_limits<double>::infinity());
  return op.used_late->flags;
}

void bind_comm(py::module_& m) {
  py::register_exception_translator(&translate);
  bind_recorder(m);
  bind_streams(m);
  bind_operations(m);
  bind_communicator(m);
  bind_kinds(m);
}

}  // namespace fsdpx
