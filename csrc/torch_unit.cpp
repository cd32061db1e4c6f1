#include "torch_unit.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "check.h"

namespace py = pybind11;
using torch::autograd::variable_list;

namespace fsdpx {

// Runs after a leaf's AccumulateGrad node has added to the leaf's gradient.
struct GradientArrival : torch::autograd::FunctionPostHook {
  explicit GradientArrival(std::shared_ptr<Unit*> unit) : unit(std::move(unit)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (*unit) (*unit)->arrived();
    return outputs;
  }
  std::shared_ptr<Unit*> unit;  // null when the unit is gone: a graph may outlive the model
};

namespace {

DType native_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      check(false, "gradients of dtype ", c10::toString(type), " are not supported");
      return DType::kFloat32;
  }
}

}  // namespace

Unit::Unit(std::string name, int64_t gathered_bytes, c10::Device device,
           std::vector<SegmentLayout> segments)
    : storage_(this, gathered_bytes, device),
      self_(std::make_shared<Unit*>(this)),
      segments_(std::move(segments)),
      owner_(py::none()) {
  storage_.set_names(std::move(name), {});
}

Unit::~Unit() { *self_ = nullptr; }

// The owner's exceptions must keep their type on the way through torch's dispatcher and autograd
// engine: those know torch's own wrapper.
void Unit::call_owner(const char* method) {
  py::gil_scoped_acquire gil;
  try {
    py::object owner = owner_.is_none() ? py::none() : owner_();
    if (!owner.is_none()) owner.attr(method)();
  } catch (py::error_already_set& error) {
    error.restore();
    python_error torch_error;
    torch_error.persist();
    throw std::move(torch_error);
  }
}

void Unit::access() {
  if (gathered_ != nullptr && !gathered_->is_followed()) gathered_->wait(0);  // a GPU's: no waiting
  if (ready() || torch::autograd::get_current_graph_task_id() == -1) return;
  notify_ = false;
  call_owner("on_access");
}

void Unit::watch(int64_t leaf) {
  const auto node = torch::autograd::impl::grad_accumulator(leaves_.at(leaf));
  node->add_post_hook(std::make_unique<GradientArrival>(self_));
  accumulator_nodes_.push_back(node.get());
  accumulators_.push_back(std::make_shared<std::decay_t<decltype(node)>>(node));
}

int64_t Unit::num_expected() const {
  const auto* in_graph = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  if (!in_graph || !exec_info) return 0;
  int64_t count = 0;
  for (auto* node : accumulator_nodes_) {
    if (!in_graph->count(node)) continue;
    if (!exec_info->empty()) {  // backward(inputs=...) or autograd.grad: only some nodes run
      const auto info = exec_info->find(node);
      if (info == exec_info->end() || !info->second.needed_) continue;
    }
    ++count;
  }
  return count;
}

void Unit::arrived() {
  const int task = torch::autograd::get_current_graph_task_id();
  auto missing = num_missing_.find(task);
  if (missing == num_missing_.end()) {
    missing = num_missing_.emplace(task, num_expected()).first;
    call_owner("on_first_gradient");
  }
  if (--missing->second == 0) {
    num_missing_.erase(missing);
    call_owner("on_gradients");
  }
}

py::object Unit::owner_of(const at::Tensor& tensor) {
  const Unit* unit = unit_of(tensor.unsafeGetTensorImpl());
  return unit && !unit->owner_.is_none() ? unit->owner_() : py::none();
}

void Unit::drop_gradients() {
  for (auto& leaf : leaves_) leaf.mutable_grad().reset();
}

std::vector<bool> Unit::has_gradients() const {
  std::vector<bool> result;
  result.reserve(leaves_.size());
  for (const auto& leaf : leaves_) result.push_back(leaf.grad().defined());
  return result;
}

void Unit::attach(void* data, bool newer, std::shared_ptr<Event> gathered) {
  storage_.attach(data);
  gathered_ = std::move(gathered);
  if (newer)
    for (auto& leaf : leaves_) leaf.unsafeGetTensorImpl()->bump_version();
  forget_edits();
}

void Unit::detach() {
  storage_.detach();
  gathered_ = nullptr;
  notify_ = false;
}

int64_t Unit::version() const {
  int64_t sum = num_writes_;
  for (const auto& leaf : leaves_) sum += leaf._version();
  return sum;
}

std::vector<ConstSpan> Unit::take_gradients(const SegmentLayout& segment,
                                            std::vector<at::Tensor>& keep_alive) {
  std::vector<ConstSpan> spans;
  for (const auto& entry : segment.entries) {
    at::Tensor gradient = std::move(leaves_[entry.leaf].mutable_grad());
    leaves_[entry.leaf].mutable_grad().reset();
    if (!gradient.defined() || entry.numel == 0) continue;
    check(gradient.layout() == at::kStrided, "a sparse gradient reached ", storage_.describe(0),
          ": use dense gradients (sparse=False)");
    if (gradient.requires_grad()) {
      took_graph_ = true;
      gradient = gradient.detach();  // the graph may go
    }
    gradient = gradient.contiguous();
    if (native_dtype(gradient.scalar_type()) != segment.gradient)
      gradient = gradient.to(leaves_[entry.leaf].scalar_type());
    spans.push_back({gradient.const_data_ptr(), entry.numel, entry.offset});
    keep_alive.push_back(std::move(gradient));
  }
  return spans;
}

void Unit::accumulate(Communicator& communicator,
                      const std::vector<std::pair<int64_t, uintptr_t>>& buffers, bool first) {
  for (const auto& [index, buffer] : buffers) {
    const SegmentLayout& segment = segments_.at(index);
    std::vector<at::Tensor> keep_alive;
    const auto spans = take_gradients(segment, keep_alive);
    int64_t numel = 0;
    for (const auto& entry : segment.entries) numel = std::max(numel, entry.offset + entry.numel);
    py::gil_scoped_release release;
    communicator.pack_gradients(spans, segment.gradient, reinterpret_cast<void*>(buffer),
                                segment.accumulator, numel, !first);
  }
}

Reduction Unit::reduce(Stream& stream, std::shared_ptr<Communicator> communicator,
                       Recorder* recorder, double scale, const std::vector<SegmentTarget>& targets,
                       std::vector<uint8_t> used) {
  auto op = std::make_shared<ReduceOp>();
  auto keep_alive = std::make_shared<std::vector<at::Tensor>>();
  op->tag = {storage_.unit_name(), communicator->moment()};
  op->used = std::move(used);
  for (const SegmentTarget& target : targets) {
    const SegmentLayout& segment = segments_.at(target.segment);
    ReduceSegment out{{},
                      segment.gradient,
                      segment.wire,
                      segment.shard_numel,
                      reinterpret_cast<void*>(target.shard),
                      segment.shard,
                      scale,
                      target.accumulate};
    if (target.accumulated) {
      out.grad_dtype = out.wire_dtype = segment.accumulator;
      out.grads = {{reinterpret_cast<const void*>(target.accumulated),
                    segment.shard_numel * communicator->size(), 0}};
    } else {
      out.grads = take_gradients(segment, *keep_alive);
    }
    op->segments.push_back(std::move(out));
  }
  const py::gil_scoped_release release;  // on a GPU the task runs here
  auto event =
      issue_reduce_scatter(stream, std::move(communicator), op, std::move(keep_alive), recorder);
  return {std::move(event), std::move(op)};
}

// ---- End of backward

namespace {

// Final callbacks do not run when backward raises, but what they own is destroyed then: the
// destructor tells the two ends apart.
struct EndGuard {
  explicit EndGuard(py::object finish) : finish(std::move(finish)) {}
  ~EndGuard() {
    py::gil_scoped_acquire gil;
    if (!ended) {
      py::error_scope keep_the_users_error;
      try {
        finish(false);
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("fsdpx: tidying up after a failed backward");
      }
    }
    finish = py::object();
  }
  void end() {
    py::gil_scoped_acquire gil;
    ended = true;
    try {
      finish(true);
    } catch (py::error_already_set& error) {
      error.restore();
      python_error torch_error;
      torch_error.persist();
      throw std::move(torch_error);
    }
  }
  py::object finish;
  bool ended = false;
};

}  // namespace

void at_backward_end(py::object finish) {
  auto guard = std::make_shared<EndGuard>(std::move(finish));
  torch::autograd::Engine::get_default_engine().queue_callback([guard] { guard->end(); });
}

}  // namespace fsdpx
