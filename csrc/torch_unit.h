// The native half of a unit: its storage, its full parameters (leaves), their gradients, and the
// attributes of its modules.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm_queue.h"
#include "communicator.h"
#include "torch_attributes.h"
#include "torch_storage.h"

namespace fsdpx {

// A dtype segment as reductions see it: which leaves lie where in the flat segment.
struct SegmentLayout {
  struct Entry {
    int64_t leaf;
    int64_t offset;
    int64_t numel;
  };
  DType gradient;     // dtype of the leaves and of their gradients
  DType wire;         // dtype that travels when gradients come straight from the leaves
  DType accumulator;  // dtype in which gradients of several backwards are added up without
                      // communication
  DType shard;        // dtype of the gradient shard
  int64_t shard_numel;
  std::vector<Entry> entries;
};

// Where one segment's reduced gradients go. `accumulated` is the flat buffer of earlier backwards,
// or 0 to reduce what the leaves hold.
struct SegmentTarget {
  int64_t segment;
  uintptr_t shard;
  bool accumulate;
  uintptr_t accumulated;
};

// A reduce-scatter in flight.
struct Reduction {
  std::shared_ptr<Event> event;
  std::shared_ptr<ReduceOp> op;
};

class Unit {
 public:
  Unit(std::string name, int64_t gathered_bytes, c10::Device device,
       std::vector<SegmentLayout> segments);
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  GatheredStorage& storage() { return storage_; }
  const GatheredStorage& storage() const { return storage_; }
  AttributeSwap& attributes() { return attributes_; }

  // The Python object whose methods `on_access`, `on_first_gradient` and `on_gradients` are called;
  // held weakly.
  void set_owner(pybind11::object owner) { owner_ = pybind11::weakref(std::move(owner)); }
  // The owner of the unit whose storage `tensor` views, or None.
  static pybind11::object owner_of(const at::Tensor& tensor);

  // ---- The full parameters' memory
  // `data` holds `num_bytes` of them. `newer`: other values than were attached before; what
  // autograd saved of those must not be read, as after an edit in place. Readers on other streams
  // than the caller's wait for `gathered`.
  void attach(void* data, bool newer, std::shared_ptr<Event> gathered);
  void detach();
  bool edited() const { return version() != version_; }  // a leaf, in place, since attach()
  void forget_edits() { version_ = version(); }

  // ---- Reading in backward
  bool ready() const {
    return storage_.attached() && !notify_ && (gathered_ == nullptr || gathered_->is_followed());
  }
  // Makes torch's current stream wait for the gather, as the first reader's does; asks the owner to
  // gather when a backward is running.
  void access();
  void set_notify(bool on) {
    notify_ = on;
  }  // the next access in a backward is told to the owner though the unit is gathered
  int64_t num_holds = 0;  // operators that are about to read the unit: it must not be freed

  // ---- Gradients
  void add_leaf(const at::Tensor& leaf) { leaves_.push_back(leaf); }
  void watch(int64_t leaf);  // from now on the leaf's gradients are counted; the leaf requires grad
  int64_t num_expected()
      const;  // leaves whose gradient the running backward accumulates, or has accumulated
  void forget_backward() { num_missing_.clear(); }
  void drop_gradients();
  // Whether a gradient that was taken since the last call had a graph (create_graph=True).
  bool took_graph() { return std::exchange(took_graph_, false); }
  std::vector<bool> has_gradients() const;
  void note_write() { ++num_writes_; }  // an operator is about to write to a full parameter

  // Adds the leaves' gradients to flat buffers (in the accumulator dtype; `first`: overwrites) and
  // drops them.
  void accumulate(Communicator& communicator,
                  const std::vector<std::pair<int64_t, uintptr_t>>& buffers, bool first);

  // Issues one reduce-scatter of all `targets`; the leaves' gradients are dropped when it has read
  // them.
  Reduction reduce(Stream& stream, std::shared_ptr<Communicator> communicator, Recorder* recorder,
                   double scale, const std::vector<SegmentTarget>& targets,
                   std::vector<uint8_t> used);

 private:
  friend struct GradientArrival;
  void arrived();
  int64_t version() const;  // sum of the leaves' version counters
  void call_owner(const char* method);
  std::vector<ConstSpan> take_gradients(const SegmentLayout& segment,
                                        std::vector<at::Tensor>& keep_alive);

  GatheredStorage storage_;
  std::shared_ptr<Unit*> self_;
  AttributeSwap attributes_;
  std::vector<SegmentLayout> segments_;
  pybind11::object owner_;
  bool notify_ = false;
  std::shared_ptr<Event> gathered_;  // the end of the gather of what is attached
  int64_t version_ = 0;
  int64_t num_writes_ = 0;  // also through `.data`, which moves no version counter
  bool took_graph_ = false;
  std::vector<at::Tensor> leaves_;
  std::vector<std::shared_ptr<void>>
      accumulators_;  // keeps the AccumulateGrad nodes that carry our hooks
  std::vector<torch::autograd::Node*> accumulator_nodes_;
  std::unordered_map<int, int64_t> num_missing_;  // by graph task: gradients still to come
};

// Keeps units from being freed while one of them is gathered for an operator that reads several.
class UnitHold {
 public:
  explicit UnitHold(const std::vector<Unit*>& units) : units_(units) {
    for (Unit* unit : units_) ++unit->num_holds;
  }
  ~UnitHold() {
    for (Unit* unit : units_) --unit->num_holds;
  }

 private:
  const std::vector<Unit*>& units_;
};

// Calls `finish(ok)` when the running backward has ended: with true at its regular end, with false
// when it raised (before the exception reaches the caller of backward).
void at_backward_end(pybind11::object finish);

// Casts the floating tensors of a nest of tuples, lists and dicts; returns the same object where
// nothing changed. Other containers are passed to `fallback`.
pybind11::object cast_inputs(pybind11::object inputs, at::ScalarType dtype,
                             pybind11::object fallback);

}  // namespace fsdpx
