#include "torch_access.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/op_registration.h>
#include <torch/library.h>

#include <memory>
#include <string_view>

#include "torch_unit.h"

namespace fsdpx {

namespace {

// Calls `visit` for every defined tensor among the last `num_arguments` values of the stack.
template <typename Visit>
void for_each_tensor(const torch::jit::Stack& stack, size_t num_arguments, const Visit& visit) {
  for (const c10::IValue& value : torch::jit::last(stack, num_arguments)) {
    if (value.isTensor()) {
      if (const auto* tensor = value.toTensor().unsafeGetTensorImpl(); value.toTensor().defined())
        visit(tensor);
    } else if (value.isList()) {  // tensor lists and lists of optional tensors
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor() && element.toTensor().defined())
          visit(element.toTensor().unsafeGetTensorImpl());
      }
    }
  }
}

// Gathers what is missing among the operands. Holding all their units keeps the gather of one from
// freeing another.
void access_operands(const torch::jit::Stack& stack, size_t num_arguments) {
  std::vector<Unit*> units;
  for_each_tensor(stack, num_arguments, [&](const c10::TensorImpl* tensor) {
    if (Unit* unit = unit_of(tensor)) units.push_back(unit);
  });
  const UnitHold hold(units);
  for (Unit* unit : units) unit->access();
}

// Says which parameter cannot be read; empty when all can.
std::string detached_operand(const torch::jit::Stack& stack, size_t num_arguments) {
  std::string found;
  for_each_tensor(stack, num_arguments, [&](const c10::TensorImpl* tensor) {
    if (Unit* unit = unit_of(tensor); unit && !unit->storage().attached() && found.empty()) {
      found = unit->storage().describe(tensor->storage_offset() *
                                       static_cast<int64_t>(tensor->itemsize()));
    }
  });
  return found;
}

// Tells the units of operands that will be written to. Edits through `.data` move no version
// counter.
void note_writes(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const auto values = torch::jit::last(stack, schema.arguments().size());
  for (size_t i = 0; i < values.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !values[i].isTensor()) continue;
    if (Unit* unit = unit_of(values[i].toTensor().unsafeGetTensorImpl())) unit->note_write();
  }
}

void access_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size();
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kAccessKey);
  bool ready = true;
  for_each_tensor(*stack, num_arguments, [&](const c10::TensorImpl* tensor) {
    if (const Unit* unit = unit_of(tensor)) ready &= unit->ready();
  });
  if (!ready) access_operands(*stack, num_arguments);
  if (op.schema().is_mutable()) note_writes(op.schema(), *stack);
  const std::string missing = ready ? std::string() : detached_operand(*stack, num_arguments);
  if (missing.empty()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  try {
    op.redispatchBoxed(below, stack);  // operators that read only sizes are fine
  } catch (const c10::Error& error) {
    constexpr const char* kReads = " is not gathered, but ";
    if (std::string_view(error.what_without_backtrace()).find(kReads) != std::string_view::npos)
      throw;  // said by an operator inside this one
    TORCH_CHECK(false, "fsdpx: ", missing, kReads, op.schema().name(),
                " reads it. Call the unit's module, register the method with "
                "fsdpx.register_fsdp_forward_method, or call "
                "unshard() first");
  }
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return false;
}

bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  }
  return false;
}

}  // namespace

// Per operator, because the key is part of the composite alias sets: with the fallback alone, an
// operator with a composite-explicit kernel would take that (slow) kernel instead of the backend's,
// and our check would be passed by. A view reads no memory, except that detach() and alias() are
// what code calls before it takes a raw pointer.
void register_access_kernels() {
  static auto* const fallback =
      new torch::Library(torch::Library::IMPL, "_", kAccessKey, __FILE__, __LINE__);
  fallback->fallback(torch::CppFunction::makeFromBoxedFunction<&access_kernel>());
  static auto* const aten =
      new torch::Library(torch::Library::IMPL, "aten", kAccessKey, __FILE__, __LINE__);
  for (const auto& op_name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string name = toString(op_name);
    if (!name.starts_with("aten::")) continue;
    const auto op = c10::Dispatcher::singleton().findOp(op_name);
    if (!op || !op->hasSchema() ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
      continue;
    if (!takes_tensors(op->schema())) continue;
    const char* const short_name = name.c_str() + 6;
    if (returns_view(op->schema()) && name != "aten::detach" && name != "aten::alias") {
      aten->impl(short_name, torch::CppFunction::makeFallthrough());
    } else if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
               op->hasKernelForDispatchKey(
                   c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) {
      aten->impl(short_name, torch::CppFunction::makeFromBoxedFunction<&access_kernel>());
    }
  }
}

}  // namespace fsdpx
