// NCCL: the collectives. Sums are in rank order, in fp32 for narrower types, rounded once.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "nccl_room.h"

using namespace sim;
using namespace sim::nccl;

namespace {

using Inputs = std::vector<const char*>;

// ---- Arithmetic

size_t width(ncclDataType_t t) {
  switch (t) {
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 1;
  }
}

const char* type_name(ncclDataType_t t) {
  static const char* const names[] = {"int8",    "uint8",    "int32",      "uint32",
                                      "int64",   "uint64",   "float16",    "float32",
                                      "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return t >= 0 && t < 12 ? names[t] : "unknown type";
}

struct Bf16 {
  uint16_t bits;
  operator float() const {
    const uint32_t u = uint32_t(bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
  explicit Bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    bits = std::isnan(f) ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
};

template <typename A>
A combine(A a, A b, int op) {
  switch (op) {
    case ncclProd:
      return a * b;
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return a + b;
  }
}

// T is the type in memory, A the type to accumulate in.
template <typename T, typename A>
void reduce_as(char* out, const Inputs& in, size_t n, int op, float scale) {
  for (size_t i = 0; i < n; ++i) {
    const auto get = [&](size_t r) {
      const A v = A(reinterpret_cast<const T*>(in[r])[i]);
      return scale == 1 ? v : A(v * A(scale));
    };
    A sum = get(0);
    uint8_t state = state_of(in[0])[i * sizeof(T)];
    for (size_t r = 1; r < in.size(); ++r) {
      sum = combine<A>(sum, get(r), op);
      state = std::min(state, state_of(in[r])[i * sizeof(T)]);
    }
    reinterpret_cast<T*>(out)[i] = T(op == ncclAvg ? A(sum / A(in.size())) : sum);
    if (on_device(out)) memset(state_of(out) + i * sizeof(T), state, sizeof(T));
  }
}

bool reducible(ncclDataType_t t) { return t <= ncclBfloat16 && t != ncclUint64 && t != ncclUint32; }

void reduce(char* out, const Inputs& in, size_t n, ncclDataType_t t, int op, float scale) {
  switch (t) {
    case ncclInt8:
      return reduce_as<int8_t, int64_t>(out, in, n, op, scale);
    case ncclUint8:
      return reduce_as<uint8_t, int64_t>(out, in, n, op, scale);
    case ncclInt32:
      return reduce_as<int32_t, int64_t>(out, in, n, op, scale);
    case ncclInt64:
      return reduce_as<int64_t, int64_t>(out, in, n, op, scale);
    case ncclFloat16:
      return reduce_as<_Float16, float>(out, in, n, op, scale);
    case ncclBfloat16:
      return reduce_as<Bf16, float>(out, in, n, op, scale);
    case ncclFloat64:
      return reduce_as<double, double>(out, in, n, op, scale);
    default:
      return reduce_as<float, float>(out, in, n, op, scale);
  }
}

// ---- One call

struct Call {
  std::string what;  // must be the same on all ranks
  const void* send;
  size_t send_bytes;
  double link_bytes;  // that cross a rank's link
  std::function<void(const Inputs&)> finish;
};

Post& post_of(ncclComm* c, int r, uint64_t k) { return c->room->posts[r][k % kRing]; }

// The input that used this place of the ring is free: all ranks have announced k - 1, so they have
// finished k - 2.
void announce(ncclComm* c, uint64_t k, const Call& call, double ready_us) {
  char*& place = c->inputs[k % kRing];
  if (place) staging_heap.give(place);
  place = staging_heap.take(call.send_bytes, 512, c->dev);
  if (!place) return raise(cudaErrorMemoryAllocation, "no staging space for a collective");
  copy(place, call.send, call.send_bytes);
  Post& mine = post_of(c, c->rank, k);
  snprintf(mine.call, sizeof mine.call, "%s", call.what.c_str());
  mine.input = place;
  mine.ready_us = ready_us;
  mine.number = k;
}

void mismatch(ncclComm* c, uint64_t k, int a, int b) {
  c->room->failed = ncclInvalidUsage;
  const auto calls = [&](int r) {
    return "rank " + std::to_string(r) + " calls " + post_of(c, r, k).call;
  };
  const std::string text = "collective " + std::to_string(k) + " of communicator " + c->id +
                           " differs: " + calls(a) + ", " + calls(b);
  last_text = "cudasim: " + text;
  raise(cudaErrorLaunchFailure, text);
}

bool all_announced(ncclComm* c, uint64_t k, double* start) {
  for (int r = 0; r < c->n; ++r) {
    if (post_of(c, r, k).number != k) return false;
  }
  for (int r = 0; r < c->n; ++r) {
    if (strcmp(post_of(c, r, k).call, post_of(c, 0, k).call)) mismatch(c, k, 0, r);
    *start = std::max(*start, post_of(c, r, k).ready_us);
  }
  return true;
}

double finish(ncclComm* c, uint64_t k, const Call& call) {
  c->finished = k;
  if (c->aborted || fault.code) return 0;
  Inputs inputs;
  for (int r = 0; r < c->n; ++r) inputs.push_back(post_of(c, r, k).input);
  call.finish(inputs);
  return call.link_bytes;
}

ncclResult_t enqueue(ncclComm* c, const Call& call, cudaStream_t st) {
  while (settings.nccl_hangs && !c->aborted) pause_us(100);
  if (c->aborted) return fail(ncclInternalError, call.what + " was aborted");
  const uint64_t k = ++c->issued;
  const int before = device;
  device = c->dev;
  Stream* const s = stream_of(st);
  device = before;
  count(kCollectives);
  Op op;
  op.name = call.what;
  op.rate = rate(settings.link_gbps);
  op.fixed_us = settings.link_us;
  op.ready = [=](Op& self) {
    if (c->aborted) return true;
    if (c->finished + 1 != k) return false;  // NCCL runs the calls of a communicator in their order
    if (post_of(c, c->rank, k).number != k) {
      announce(c, k, call, std::max({s->time, self.host_us, self.not_before}));
    }
    return all_announced(c, k, &self.not_before);
  };
  op.waiting_for = [=] {
    const auto here = [&](int r) { return post_of(c, r, k).number == k; };
    return call.what + ", collective " + std::to_string(k) + " of communicator " + c->id +
           ", which ranks " + missing(c->n, here) + " of " + std::to_string(c->n) +
           " have not reached";
  };
  op.run = [=] { return finish(c, k, call); };
  push(s, std::move(op));
  return ncclResult_t(c->room->failed.load());
}

std::string describe(const char* name, size_t n, ncclDataType_t t, const std::string& more = "") {
  return std::string(name) + "(count=" + std::to_string(n) + ", " + type_name(t) + more + ")";
}
std::string op_text(ncclComm* c, int op) {
  static const char* const names[] = {"sum", "prod", "max", "min", "avg"};
  if (op < ncclNumOps) return std::string(", ") + names[op];
  return ", premul " + std::to_string(c->premul[size_t(op - ncclNumOps)]);
}
float scale_of(ncclComm* c, int op) {
  return op < ncclNumOps ? 1 : c->premul[size_t(op - ncclNumOps)];
}
bool can_reduce(ncclComm* c, ncclDataType_t t, int op) {
  return op >= 0 && size_t(op) < ncclNumOps + c->premul.size() && reducible(t);
}

}  // namespace

API ncclResult_t ncclAllGather(const void* send, void* recv, size_t n, ncclDataType_t t,
                               ncclComm_t c, cudaStream_t s) {
  Lock lock;
  CHECK_COMM(c);
  const size_t bytes = n * width(t);
  const auto gather = [=](const Inputs& in) {
    for (size_t r = 0; r < in.size(); ++r) copy(static_cast<char*>(recv) + r * bytes, in[r], bytes);
  };
  return enqueue(c, {describe("AllGather", n, t), send, bytes, double(bytes) * (c->n - 1), gather},
                 s);
}

API ncclResult_t ncclAlltoAll(const void* send, void* recv, size_t n, ncclDataType_t t,
                              ncclComm_t c, cudaStream_t s) {
  Lock lock;
  CHECK_COMM(c);
  const size_t bytes = n * width(t);
  const auto exchange = [=](const Inputs& in) {
    const size_t mine = static_cast<size_t>(c->rank) * bytes;
    for (size_t r = 0; r < in.size(); ++r) {
      copy(static_cast<char*>(recv) + r * bytes, in[r] + mine, bytes);
    }
  };
  const size_t all = bytes * static_cast<size_t>(c->n);
  const double link_bytes = double(bytes) * (c->n - 1);
  return enqueue(c, {describe("AlltoAll", n, t), send, all, link_bytes, exchange}, s);
}

API ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t n, ncclDataType_t t,
                                   ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  Lock lock;
  CHECK_COMM(c);
  if (!can_reduce(c, t, op)) return fail(ncclInvalidArgument, "ReduceScatter: not simulated");
  const size_t bytes = n * width(t);
  const float scale = scale_of(c, op);
  const std::string what = describe("ReduceScatter", n, t, op_text(c, op));
  const auto scatter = [=](Inputs in) {
    for (const char*& p : in) p += static_cast<size_t>(c->rank) * bytes;
    reduce(static_cast<char*>(recv), in, n, t, op, scale);
  };
  const size_t all = bytes * static_cast<size_t>(c->n);
  return enqueue(c, {what, send, all, double(bytes) * (c->n - 1), scatter}, s);
}

API ncclResult_t ncclAllReduce(const void* send, void* recv, size_t n, ncclDataType_t t,
                               ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  Lock lock;
  CHECK_COMM(c);
  if (!can_reduce(c, t, op)) return fail(ncclInvalidArgument, "AllReduce: not simulated");
  const size_t bytes = n * width(t);
  const float scale = scale_of(c, op);
  const std::string what = describe("AllReduce", n, t, op_text(c, op));
  const double link_bytes = 2.0 * double(bytes) * (c->n - 1) / c->n;  // scattered, then gathered
  const auto all = [=](const Inputs& in) { reduce(static_cast<char*>(recv), in, n, t, op, scale); };
  return enqueue(c, {what, send, bytes, link_bytes, all}, s);
}

API ncclResult_t ncclBroadcast(const void* send, void* recv, size_t n, ncclDataType_t t, int root,
                               ncclComm_t c, cudaStream_t s) {
  Lock lock;
  CHECK_COMM(c);
  const size_t bytes = n * width(t), mine = c->rank == root ? bytes : 0;
  const std::string what = describe("Broadcast", n, t, ", root " + std::to_string(root));
  const double link_bytes = double(bytes) * (c->n - 1) / c->n;
  const auto take = [=](const Inputs& in) { copy(recv, in[size_t(root)], bytes); };
  return enqueue(c, {what, send, mine, link_bytes, take}, s);
}
API ncclResult_t ncclBcast(void* p, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                           cudaStream_t s) {
  return ncclBroadcast(p, p, n, t, root, c, s);
}
// No call blocks the host, so there is nothing to collect.
API ncclResult_t ncclGroupStart() { return ncclSuccess; }
API ncclResult_t ncclGroupEnd() { return ncclSuccess; }

API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t t,
                                          ncclScalarResidence_t where, ncclComm_t c) {
  Lock lock;
  CHECK_COMM(c);
  if (where != ncclScalarHostImmediate || (t != ncclFloat32 && t != ncclBfloat16)) {
    return fail(ncclInvalidUsage, "ncclRedOpCreatePreMulSum: not simulated");
  }
  *op = ncclRedOp_t(ncclNumOps + c->premul.size());
  c->premul.push_back(t == ncclFloat32 ? *static_cast<float*>(scalar)
                                       : float(*static_cast<Bf16*>(scalar)));
  return ncclSuccess;
}
API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
