// A backend for PrivateUse1. Its tensors have storage of their own, in the machine's memory, that the CPU's operators do
// not take; allocation, copies, views and scalars are its own, and every other operator is computed on CPU copies.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>

namespace {

constexpr c10::DeviceType kAbacus = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device here() {
    return c10::Device(kAbacus, 0);
}

// Memory

std::atomic<int64_t> held{0}, peak{0};

struct Block {
    void* data;
    int64_t size;
};

void release(void* context) {
    auto* block = static_cast<Block*>(context);
    held -= block->size;
    c10::free_cpu(block->data);
    delete block;
}

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        auto* block = new Block{c10::alloc_cpu(size), static_cast<int64_t>(size)};
        const int64_t now = held += block->size;
        int64_t most = peak;
        while (now > most && !peak.compare_exchange_weak(most, now)) {
        }
        return {block->data, block, &release, here()};
    }

    void copy_data(void* to, const void* from, size_t count) const override {
        default_copy_data(to, from, count);
    }
};

Memory memory;
REGISTER_ALLOCATOR(kAbacus, &memory);

// Devices and streams: there is one of each

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override {
        return kAbacus;
    }
    c10::Device exchangeDevice(c10::Device) const override {
        return here();
    }
    c10::Device getDevice() const override {
        return here();
    }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() <= 0, "there is one abacus, and no number ", int(device.index()));
    }
    void uncheckedSetDevice(c10::Device) const noexcept override {
    }
    c10::Stream getStream(c10::Device) const override {
        return c10::Stream(c10::Stream::DEFAULT, here());
    }
    c10::Stream exchangeStream(c10::Stream) const override {
        return c10::Stream(c10::Stream::DEFAULT, here());
    }
    c10::DeviceIndex deviceCount() const noexcept override {
        return 1;
    }
    void synchronizeDevice(const c10::DeviceIndex) const override {
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override {
        return true;
    }
    bool isAvailable() const override {
        return true;
    }
    bool hasPrimaryContext(c10::DeviceIndex) const override {
        return true;
    }
    c10::Device getDeviceFromPtr(void*) const override {
        return here();
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
        at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
    }
};

const bool registered = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

// Operators

// The memory of a tensor as a CPU tensor: both are memory of this machine.
at::Tensor seen(const at::Tensor& tensor) {
    if (tensor.is_cpu()) {
        return tensor;
    }
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
    return at::Tensor(at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
    return at::Tensor(
        at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype)));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
    seen(to).copy_(seen(from));
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    if (from.sizes() != to.sizes()) {
        to.resize_(from.sizes());
    }
    return copy_from(from, to, false);
}

at::Scalar scalar(const at::Tensor& tensor) {
    return seen(tensor).item();
}

int64_t attention(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
    return 0; // SDPBackend::math: a fused kernel would have to be our own
}

void check_place(const at::Tensor& tensor, const c10::OperatorHandle& op) {
    // A tensor without dimensions may be anywhere, as for any device.
    TORCH_CHECK(
        !tensor.defined() || tensor.dim() == 0 || tensor.device().type() == kAbacus,
        "Expected all tensors to be on the same device, but ",
        op.operator_name(),
        " found ",
        here(),
        " and ",
        tensor.device());
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
        if (argument.isTensor()) {
            check_place(argument.toTensor(), op);
        } else if (argument.isTensorList()) {
            for (const at::Tensor& tensor : argument.toTensorVector()) {
                check_place(tensor, op);
            }
        }
    }
    at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &scalar);
    m.impl("_fused_sdp_choice", &attention);
    m.impl("as_strided", &at::native::as_strided_tensorimpl);
    m.impl("view", &at::native::view);
    m.impl("_reshape_alias", &at::native::_reshape_alias);
    m.impl("unfold", &at::native::unfold);
    m.impl("resize_", &at::native::resize_);
    m.impl("set_.source_Storage", &at::native::set_);
    m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
    m.impl("set_.source_Tensor", &at::native::set_tensor_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY(abacus, m) {
    m.def("held() -> int", [] { return held.load(); });
    m.def("peak() -> int", [] { return peak.load(); });
    m.def("reset_peak() -> ()", [] { peak = held.load(); });
}

} // namespace
