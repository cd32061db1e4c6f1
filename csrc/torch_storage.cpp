#include "torch_storage.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>

#include "check.h"
#include "torch_access.h"

namespace fsdpx {

namespace {

constexpr size_t kNamesInMessage = 8;

void release_handle(void* context) {
  auto* handle = static_cast<UnitHandle*>(context);
  if (handle->num_references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete handle;
}

c10::DispatchKeySet key_set(c10::Device device) {
  const auto base =
      device.is_cuda()
          ? c10::DispatchKeySet({c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA})
          : c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU});
  return base.add(c10::DispatchKey::ADInplaceOrView).add(kAccessKey);
}

}  // namespace

GatheredStorage::GatheredStorage(Unit* unit, int64_t num_bytes, c10::Device device)
    : handle_(new UnitHandle), device_(device), num_bytes_(num_bytes) {
  handle_->unit = unit;
  storage_ = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), num_bytes, pointer(nullptr), /*allocator=*/nullptr,
      /*resizable=*/false));
  detach();
}

GatheredStorage::~GatheredStorage() {
  handle_->unit = nullptr;
  detached_message_ =
      "fsdpx: unit '" + unit_name_ +
      "' no longer exists as a forward has read it: its module was deleted, or was converted to "
      "another dtype, while a backward or a view of its parameters is still to come. Run the "
      "forward again";
  detach();
  release_handle(handle_);
}

c10::DataPtr GatheredStorage::pointer(void* data) const {
  handle_->num_references.fetch_add(1, std::memory_order_relaxed);
  return {data, handle_, &release_handle, device_};
}

void GatheredStorage::attach(void* data) {
  auto* storage = storage_.unsafeGetStorageImpl();
  storage->clear_data_ptr_access_error_msg_();
  storage->set_data_ptr_noswap(pointer(data));
  data_ = data;
  attached_ = true;
}

void GatheredStorage::detach() {
  auto* storage = storage_.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(pointer(nullptr));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(detached_message_);
  data_ = nullptr;
  attached_ = false;
}

at::Tensor GatheredStorage::segment(int64_t offset_bytes, int64_t numel,
                                    at::ScalarType dtype) const {
  const int64_t size = static_cast<int64_t>(c10::elementSize(dtype));
  check(offset_bytes >= 0 && offset_bytes % size == 0 && offset_bytes + numel * size <= num_bytes_,
        "segment at byte ", offset_bytes, " of ", numel, " elements does not fit the ", num_bytes_,
        " bytes of unit '", unit_name_, "'");
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage_), key_set(device_),
                                                         c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset_bytes / size);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor;
}

void GatheredStorage::set_names(std::string unit, std::vector<ParameterRange> parameters) {
  unit_name_ = std::move(unit);
  parameters_ = std::move(parameters);
  std::string names;
  for (size_t i = 0; i < std::min(parameters_.size(), kNamesInMessage); ++i)
    names += (i ? ", '" : "'") + parameters_[i].name + "'";
  if (parameters_.size() > kNamesInMessage) names += ", ...";
  detached_message_ = "fsdpx: unit '" + unit_name_ +
                      "' is not gathered: a parameter of it (one of " + names +
                      ") was read outside the unit's forward and backward. Call the unit's module, "
                      "register the method with "
                      "fsdpx.register_fsdp_forward_method, or call unshard() first";
  if (!attached_) detach();
}

std::string GatheredStorage::describe(int64_t offset_bytes) const {
  for (const auto& range : parameters_) {
    if (offset_bytes >= range.begin_bytes &&
        offset_bytes < std::max(range.end_bytes, range.begin_bytes + 1)) {
      return "parameter '" + range.name + "' of unit '" + unit_name_ + "'";
    }
  }
  return "unit '" + unit_name_ + "'";
}

Unit* unit_of(const c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return nullptr;
  const auto& data = tensor->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &release_handle ? static_cast<UnitHandle*>(data.get_context())->unit
                                               : nullptr;
}

}  // namespace fsdpx
