// Operators of handles alone: allocation, sizes and views. All that reads or writes memory is the driver's.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>

#include "streams.h"

namespace sim {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

inline c10::OptionalDeviceGuard on(std::optional<c10::Device> device) {
    return c10::OptionalDeviceGuard(device && device->has_index() ? device : std::nullopt);
}

inline at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
    const auto guard = on(device);
    return at::Tensor(at::detail::empty_generic(size, &memory(), kKeys, c10::dtype_or_default(dtype), format));
}

inline at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
    const auto guard = on(device);
    return at::Tensor(
        at::detail::empty_strided_generic(size, stride, &memory(), kKeys, c10::dtype_or_default(dtype)));
}

inline void grow(const at::Tensor& tensor, size_t needed) {
    if (tensor.numel() > 0 && needed > tensor.storage().nbytes()) {
        resize_storage(tensor.storage().unsafeGetStorageImpl(), static_cast<int64_t>(needed));
    }
}

inline const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
    at::detail::check_size_nonnegative(size);
    auto* handle = self.unsafeGetTensorImpl();
    if (self.sizes() != size) {
        handle->set_sizes_contiguous(size);
        grow(self, at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset()));
    }
    if (format && *format != at::MemoryFormat::Preserve) {
        handle->empty_tensor_restride(*format);
    }
    return self;
}

inline at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
    at::native::checkSetStorage(self, source, offset, size, stride);
    auto* handle = self.unsafeGetTensorImpl();
    handle->set_storage_offset(offset);
    if (stride.data() != nullptr) {
        handle->set_sizes_and_strides(size, stride);
    } else {
        handle->set_sizes_contiguous(size);
    }
    grow(self, at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), offset));
    return self;
}

inline at::Tensor& set_nothing(at::Tensor& self) {
    const c10::Storage none(
        c10::Storage::use_byte_size_t(), 0, region(self.device().index()).allocate(0), &memory(), true);
    return set_storage(self, none, 0, {0}, {});
}

// A block is not used again before the commands that hold it are done, whatever their stream: see `driver.py`.
inline void record_stream(at::Tensor&, c10::Stream) {
}

// PyTorch asks a table for the kind of attention, and not its dispatcher, where `attention.py` answers.
inline int64_t choose_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
    return at::_fused_sdp_choice(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
}

} // namespace sim
