// libcudart: streams and events.
#include <algorithm>

#include "ipc.h"
#include "sim.h"

using namespace sim;

namespace {

Event* event_of(cudaEvent_t e) { return reinterpret_cast<Event*>(e); }

void record_shared(Event* e, Stream* s, Op op) {
  SharedEvent* const shared = e->shared;
  const uint64_t version = ++shared->recorded;
  op.run = [=] {
    shared->time = s->time;
    shared->done = version;
    return 0.0;
  };
  push(s, std::move(op));
  drain(s);  // other processes cannot make this stream run, so it runs now
}

Op wait_for_process(SharedEvent* shared) {
  const uint64_t version = shared->recorded;
  Op op;
  op.ready = [=](Op& self) {
    if (shared->done < version) return false;
    self.not_before = shared->time;
    return true;
  };
  op.waiting_for = [] { return std::string("an event of another process"); };
  return op;
}

}  // namespace

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  Lock lock;
  *s = reinterpret_cast<cudaStream_t>(new_stream(device));
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
  return cudaStreamCreateWithPriority(s, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) {
  Lock lock;
  drain(stream_of(s));
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  Lock lock;
  sync(stream_of(s));
  return result();
}
API cudaError_t cudaStreamQuery(cudaStream_t s) {
  Lock lock;
  poll();
  return stream_of(s)->queue.empty() ? result() : cudaErrorNotReady;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  *s = settings.capturing != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s,
                                         unsigned long long* id, cudaGraph_t*,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                         size_t*) {
  *s = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) {
  Lock lock;
  enter_context();
  auto* const event = new Event;
  event->device = device;
  if (flags & cudaEventInterprocess) {
    char* const place = staging_heap.take(sizeof(SharedEvent), 512, device);
    memset(place, 0, sizeof(SharedEvent));
    event->shared = reinterpret_cast<SharedEvent*>(place);
  }
  *e = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
  Lock lock;
  if (!event_of(e)->shared) delete event_of(e);  // what is queued holds its records, not the event
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t ev, cudaStream_t st, unsigned) {
  Lock lock;
  Event* const e = event_of(ev);
  Stream* const s = stream_of(st);
  enter_context();
  if (e->device != s->device) return result(cudaErrorInvalidResourceHandle);
  Op op;
  op.name = "record";
  op.traced = false;
  op.record = e->latest = std::make_shared<Record>();
  if (e->shared) {
    record_shared(e, s, std::move(op));
  } else {
    push(s, std::move(op));
  }
  return result();
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  return cudaEventRecordWithFlags(e, s, 0);
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t ev, unsigned) {
  Lock lock;
  enter_context();
  const Event* const e = event_of(ev);
  if (!e->latest && !e->remote) return result();  // never recorded: no wait, as in CUDA
  if (e->latest && note_wait(stream_of(s), *e->latest)) return result();
  Op op;
  if (e->remote) {
    op = wait_for_process(e->shared);
  } else {
    op.wait = e->latest;
  }
  op.name = "wait";
  op.traced = false;
  push(stream_of(s), std::move(op));
  return result();
}
API cudaError_t cudaEventQuery(cudaEvent_t ev) {
  Lock lock;
  enter_context();
  poll();
  const Event* const e = event_of(ev);
  const bool done =
      e->remote ? e->shared->done >= e->shared->recorded : !e->latest || e->latest->done;
  return done ? result() : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t ev) {
  Lock lock;
  count(kHostWaits);
  Event* const e = event_of(ev);
  if (e->remote) {
    if (!wait_until([e] { return e->shared->done >= e->shared->recorded; })) {
      raise(cudaErrorLaunchTimeout, "timeout: an event of another process");
    }
    host_us = std::max(host_us, e->shared->time);
  } else if (const RecordPtr r = e->latest) {
    drive(r->stream, [r] { return r->done; });
    host_us = std::max(host_us, r->time);
  }
  return result();
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  Lock lock;
  const RecordPtr x = event_of(a)->latest, y = event_of(b)->latest;
  if (!x || !y) return result(cudaErrorInvalidResourceHandle);
  if (!x->done || !y->done) return cudaErrorNotReady;
  *ms = float((y->time - x->time) / 1000);
  return result();
}

API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* h, cudaEvent_t e) {
  Lock lock;
  if (!event_of(e)->shared) return result(cudaErrorInvalidResourceHandle);
  ipc::fill(h, ipc::kEvent, event_of(e)->shared);
  return result();
}
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* e, cudaIpcEventHandle_t h) {
  Lock lock;
  void* p = nullptr;
  const cudaError_t opened = ipc::open(h, ipc::kEvent, &p);
  if (opened) return result(opened);
  auto* const event = new Event;
  event->shared = static_cast<SharedEvent*>(p);
  event->remote = true;
  *e = reinterpret_cast<cudaEvent_t>(event);
  return result();
}
