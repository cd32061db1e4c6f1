// The gathered form of a unit: one permanent torch storage whose memory comes and goes.
//
// [Note: Attach and detach] Views of the unit (the parameters that `forward` sees, tensors that
// autograd saved) point at a StorageImpl that lives as long as they do. Gathering attaches memory
// to it, freeing detaches it; no view is remade and no version counter moves. While nothing is
// attached, reading the storage raises an error that names the unit.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <string>
#include <vector>

namespace fsdpx {

class Unit;

// From a tensor to its unit: the context of the storage's DataPtr. It outlives the unit while views
// exist; `unit` is null then.
struct UnitHandle {
  std::atomic<int64_t> num_references{1};
  Unit* unit = nullptr;
};

// A parameter's bytes in the gathered storage.
struct ParameterRange {
  int64_t begin_bytes;
  int64_t end_bytes;
  std::string name;
};

class GatheredStorage {
 public:
  GatheredStorage(Unit* unit, int64_t num_bytes, c10::Device device);
  ~GatheredStorage();
  GatheredStorage(const GatheredStorage&) = delete;
  GatheredStorage& operator=(const GatheredStorage&) = delete;

  void attach(
      void* data);  // at least num_bytes, readable; the caller keeps it alive until detach()
  void detach();
  bool attached() const { return attached_; }
  void* data() const { return data_; }

  // A 1-D tensor over `numel` elements at `offset_bytes`, with the dispatch key of torch_access.h.
  // Shapes of parameters are views of it.
  at::Tensor segment(int64_t offset_bytes, int64_t numel, at::ScalarType dtype) const;

  void set_names(std::string unit, std::vector<ParameterRange> parameters);
  const std::string& unit_name() const { return unit_name_; }
  // The parameter at a byte of the storage, or the unit's name when there is none.
  std::string describe(int64_t offset_bytes) const;

 private:
  c10::DataPtr pointer(void* data) const;
  c10::Storage storage_;
  UnitHandle* handle_;
  c10::Device device_;
  int64_t num_bytes_;
  bool attached_ = false;
  void* data_ = nullptr;
  std::string unit_name_;
  std::string detached_message_;
  std::vector<ParameterRange> parameters_;
};

// The unit whose storage `tensor` views; null for every other tensor.
Unit* unit_of(const c10::TensorImpl* tensor);

}  // namespace fsdpx
