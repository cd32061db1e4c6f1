// Checks, the choice of the instruction set, and the loops over spans and sources.
#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <string_view>

#include "check.h"
#include "float_environment.h"
#include "kernels_table.h"

namespace fsdpx {
namespace {

// From here on, a destination is written past the caches: it would evict what is in them, and
// fetching each line before it is overwritten costs more than a reader's later miss. Below, readers
// find it in the cache.
constexpr int64_t kStreamBytes = int64_t{32} << 20;
// Elements of a partial sum: short, so that the hardware prefetches all sources at once.
constexpr int64_t kSumBlock = 256;
constexpr uintptr_t kLineBytes = 64;                 // a cache line
constexpr int64_t kSpreadBytes = int64_t{16} << 10;  // on their way to several destinations
constexpr int64_t kMaxNumel = int64_t{1} << 58;      // sizes in bytes stay within 64 bits

std::span<const PassTable* const> tables() {  // the best first
#if defined(__x86_64__)
  static const bool kHasAvx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  static const bool kHasAvx512 =
      kHasAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const PassTable* const kTables[] = {&kAvx512Passes, &kAvx2Passes, &kPortablePasses};
  return std::span(kTables).subspan(kHasAvx512 ? 0 : kHasAvx2 ? 1 : 2);
#else
  static const PassTable* const kTables[] = {&kPortablePasses};
  return kTables;
#endif
}

std::atomic<const PassTable*>& chosen_table() {
  static std::atomic<const PassTable*> chosen = tables().front();
  return chosen;
}

// One request, checked: from which type to which, and how.
class Conversion {
 public:
  Conversion(const char* operation, DType from, DType to, double scale, bool accumulate)
      : operation_(operation),
        from_(from),
        to_(to),
        scale_(scale),
        accumulate_(accumulate),
        table_(chosen_table().load(std::memory_order_relaxed)) {
    const bool arithmetic = is_floating(from) && is_floating(to);
    check(arithmetic || (from == to && scale == 1.0 && !accumulate), operation, ": ", name(from),
          " to ", name(to), " with scale ", scale, accumulate ? " and accumulation" : "",
          " is not supported; types other than float32, float64, float16, bfloat16, float8_e4m3fn "
          "and float8_e5m2 can only be copied as they are");
  }

  bool copies() const { return from_ == to_ && scale_ == 1.0 && !accumulate_; }
  bool streams(int64_t numel) const {
    return !accumulate_ && numel >= kStreamBytes / itemsize(to_);
  }

  // `stream`: write past the caches, and call finish() in the end.
  void run(const void* src, void* dst, int64_t numel, bool stream) const {
    if (numel == 0) return;
    if (copies()) {
      const int64_t nbytes = numel * itemsize(to_);
      if (stream) {
        table_->stream_copy(src, dst, nbytes);
      } else {
        std::memcpy(dst, src, static_cast<size_t>(nbytes));
      }
      return;
    }
    const auto& passes = accumulate_ ? table_->add : stream ? table_->stream : table_->set;
    passes[static_cast<int>(from_)][static_cast<int>(to_)](src, dst, numel, scale_);
  }

  // The same values to several destinations; the source is read once, block by block.
  void run_to_all(const void* src, std::span<void* const> dsts, int64_t numel, bool stream) const {
    alignas(64) char block[kSpreadBytes];
    const int64_t block_numel = kSpreadBytes / itemsize(to_);
    for (int64_t i = 0; i < numel; i += block_numel) {
      const int64_t count = std::min(block_numel, numel - i);
      const int64_t nbytes = count * itemsize(to_);
      const void* values = at(src, i, from_);
      if (!copies()) {
        run(values, block, count, false);
        values = block;
      }
      for (void* dst : dsts) {
        char* const target = static_cast<char*>(dst) + i * itemsize(to_);
        if (stream) {
          table_->stream_copy(values, target, nbytes);
        } else {
          std::memcpy(target, values, static_cast<size_t>(nbytes));
        }
      }
    }
  }

  // The sum of several sources, block by block.
  void run_sum(std::span<const void* const> srcs, void* dst, int64_t numel, bool stream) const {
    const bool wide = from_ == DType::kFloat64 || to_ == DType::kFloat64;
    const int sum_code = static_cast<int>(wide ? DType::kFloat64 : DType::kFloat32);
    const Pass first = table_->set[static_cast<int>(from_)][sum_code];
    const Pass next = table_->add[static_cast<int>(from_)][sum_code];
    const auto& passes = accumulate_ ? table_->add : stream ? table_->stream : table_->set;
    const Pass last = passes[sum_code][static_cast<int>(to_)];
    alignas(kLineBytes) double sum[kSumBlock];
    // Blocks begin where lines of the destination do, as far as whole elements allow.
    const uintptr_t past = reinterpret_cast<uintptr_t>(dst) % kLineBytes;
    int64_t count = past == 0 ? kSumBlock : static_cast<int64_t>(kLineBytes - past) / itemsize(to_);
    for (int64_t i = 0; i < numel; i += count, count = kSumBlock) {
      count = std::min(count, numel - i);
      first(at(srcs[0], i, from_), sum, count, 1.0);
      for (const void* src : srcs.subspan(1)) next(at(src, i, from_), sum, count, 1.0);
      last(sum, static_cast<char*>(dst) + i * itemsize(to_), count, scale_);
    }
  }

  void finish(bool stream) const {
    if (stream) table_->finish_streaming();
  }

  // Conversions work on whole elements; copies move bytes and take any address.
  void check_source(const char* what, size_t index, const void* data) const {
    check_address(what, index, data, from_);
  }
  void check_destination(const char* what, size_t index, const void* data) const {
    check_address(what, index, data, to_);
  }

  void check_apart(const char* what, size_t index, const void* src, int64_t src_numel,
                   const void* dst, int64_t dst_numel) const {
    const uintptr_t src_begin = reinterpret_cast<uintptr_t>(src);
    const uintptr_t dst_begin = reinterpret_cast<uintptr_t>(dst);
    const uintptr_t src_end = src_begin + static_cast<uintptr_t>(src_numel * itemsize(from_));
    const uintptr_t dst_end = dst_begin + static_cast<uintptr_t>(dst_numel * itemsize(to_));
    check(src_numel == 0 || dst_numel == 0 || src_end <= dst_begin || dst_end <= src_begin,
          operation_, ": source and destination overlap at ", what, " ", index,
          "; write to other memory");
  }

  static const void* at(const void* data, int64_t index, DType dtype) {
    return static_cast<const char*>(data) + index * itemsize(dtype);
  }

 private:
  void check_address(const char* what, size_t index, const void* data, DType dtype) const {
    check(data != nullptr, operation_, ": ", what, " ", index, " is a null pointer");
    check(copies() || reinterpret_cast<uintptr_t>(data) % itemsize(dtype) == 0, operation_, ": ",
          what, " ", index, " is not aligned to the ", itemsize(dtype), " bytes of ", name(dtype),
          "; copy it to aligned memory first");
  }

  const char* operation_;
  DType from_;
  DType to_;
  double scale_;
  bool accumulate_;
  const PassTable* table_;
};

void check_numel(const char* operation, int64_t numel) {
  check(numel >= 0 && numel <= kMaxNumel, operation, ": numel is ", numel,
        "; it must lie between 0 and ", kMaxNumel);
}

// A span that lies in [begin, flat_numel).
void check_span(const char* operation, size_t index, int64_t numel, int64_t offset, int64_t begin,
                int64_t flat_numel) {
  check(numel >= 0 && offset >= 0, operation, ": span ", index, " has numel ", numel,
        " and offset ", offset, "; neither may be negative");
  check(offset >= begin, operation, ": span ", index, " starts at ", offset,
        ", before the end of the one before it (", begin, "); spans must ascend");
  check(numel <= flat_numel && offset <= flat_numel - numel, operation, ": span ", index,
        " covers elements [", offset, ", ", offset, " + ", numel, ") of a flat buffer of ",
        flat_numel);
}

}  // namespace

void cast(const void* src, DType from, void* dst, DType to, int64_t numel, double scale,
          bool accumulate) {
  const Conversion conversion("cast", from, to, scale, accumulate);
  check_numel("cast", numel);
  if (numel == 0) return;
  conversion.check_source("source", 0, src);
  conversion.check_destination("destination", 0, dst);
  conversion.check_apart("source", 0, src, numel, dst, numel);
  const FloatEnvironment environment;
  const bool stream = conversion.streams(numel);
  conversion.run(src, dst, numel, stream);
  conversion.finish(stream);
}

void cast_to_all(const void* src, DType from, std::span<void* const> dsts, DType to,
                 int64_t numel) {
  if (dsts.size() == 1) return cast(src, from, dsts[0], to, numel);
  const Conversion conversion("cast_to_all", from, to, 1.0, false);
  check_numel("cast_to_all", numel);
  if (numel == 0 || dsts.empty()) return;
  conversion.check_source("source", 0, src);
  for (size_t i = 0; i < dsts.size(); ++i) {
    conversion.check_destination("destination", i, dsts[i]);
    conversion.check_apart("destination", i, src, numel, dsts[i], numel);
  }
  const FloatEnvironment environment;
  const auto num_dsts = static_cast<int64_t>(dsts.size());
  const bool stream = conversion.streams(std::min(numel, kMaxNumel / num_dsts) * num_dsts);
  conversion.run_to_all(src, dsts, numel, stream);
  conversion.finish(stream);
}

void pack(std::span<const ConstSpan> srcs, DType from, void* flat, DType to, int64_t flat_numel,
          double scale, bool accumulate) {
  const Conversion conversion("pack", from, to, scale, accumulate);
  check_numel("pack", flat_numel);
  if (flat_numel > 0) conversion.check_destination("flat buffer", 0, flat);
  int64_t end = 0;
  for (size_t i = 0; i < srcs.size(); ++i) {
    const ConstSpan& src = srcs[i];
    check_span("pack", i, src.numel, src.offset, end, flat_numel);
    if (src.data != nullptr && src.numel > 0) {
      conversion.check_source("span", i, src.data);
      conversion.check_apart("span", i, src.data, src.numel, flat, flat_numel);
    }
    end = src.offset + src.numel;
  }

  const FloatEnvironment environment;
  const bool stream = conversion.streams(flat_numel);
  char* const bytes = static_cast<char*>(flat);
  const auto clear = [&](int64_t begin, int64_t until) {
    if (!accumulate && until > begin) {
      std::memset(bytes + begin * itemsize(to), 0,
                  static_cast<size_t>((until - begin) * itemsize(to)));
    }
  };
  int64_t written = 0;
  for (const ConstSpan& src : srcs) {
    if (src.data == nullptr || src.numel == 0) continue;
    clear(written, src.offset);
    conversion.run(src.data, bytes + src.offset * itemsize(to), src.numel, stream);
    written = src.offset + src.numel;
  }
  clear(written, flat_numel);
  conversion.finish(stream);
}

void unpack(const void* flat, DType from, std::span<const Span> dsts, DType to, double scale,
            bool accumulate) {
  const Conversion conversion("unpack", from, to, scale, accumulate);
  int64_t total = 0;
  for (size_t i = 0; i < dsts.size(); ++i) {
    const Span& dst = dsts[i];
    check_span("unpack", i, dst.numel, dst.offset, 0, kMaxNumel);
    if (dst.numel == 0) continue;
    conversion.check_source("flat buffer", 0, flat);
    conversion.check_destination("span", i, dst.data);
    conversion.check_apart("span", i, Conversion::at(flat, dst.offset, from), dst.numel, dst.data,
                           dst.numel);
    total += dst.numel;
  }

  const FloatEnvironment environment;
  const bool stream = conversion.streams(total);
  for (const Span& dst : dsts) {
    conversion.run(Conversion::at(flat, dst.offset, from), dst.data, dst.numel, stream);
  }
  conversion.finish(stream);
}

void reduce(std::span<const void* const> srcs, DType from, void* dst, DType to, int64_t numel,
            double scale, bool accumulate) {
  const Conversion conversion("reduce", from, to, scale, accumulate);
  check_numel("reduce", numel);
  check(!srcs.empty(), "reduce: there are no sources; give at least one");
  check(srcs.size() == 1 || is_floating(from), "reduce: ", name(from),
        " cannot be added; only floating types can");
  if (numel == 0) return;
  conversion.check_destination("destination", 0, dst);
  for (size_t k = 0; k < srcs.size(); ++k) {
    conversion.check_source("source", k, srcs[k]);
    conversion.check_apart("source", k, srcs[k], numel, dst, numel);
  }
  const FloatEnvironment environment;
  const bool stream = conversion.streams(numel);
  if (srcs.size() == 1) {
    conversion.run(srcs[0], dst, numel, stream);
  } else {
    conversion.run_sum(srcs, dst, numel, stream);
  }
  conversion.finish(stream);
}

const char* isa() { return chosen_table().load(std::memory_order_relaxed)->isa; }

void set_isa(const char* name) {
  const std::string_view wanted(name);
  std::string known = "auto";
  for (const PassTable* table : tables()) {
    if (wanted == "auto" || wanted == table->isa) {
      chosen_table().store(table, std::memory_order_relaxed);
      return;
    }
    known += std::string(", ") + table->isa;
  }
  check(false, "set_isa: \"", name,
        "\" is not an instruction set that this machine has; use one of ", known);
}

}  // namespace fsdpx
