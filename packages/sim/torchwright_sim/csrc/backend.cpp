// The host's side of simulated devices, in PyTorch's place for backends of other packages (PrivateUse1).

#include <torch/library.h>

#include "autocast.h"
#include "operators.h"

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}

namespace sim {
namespace {

REGISTER_ALLOCATOR(kType, &memory());
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Reserves the devices' address ranges, and only then takes PyTorch's place for another backend.
void start(int64_t devices, int64_t capacity) {
    TORCH_CHECK(regions().empty(), "the simulated devices are started already");
    TORCH_CHECK(devices > 0 && devices <= kMostDevices, "from 1 to ", kMostDevices, " devices, not ", devices);
    for (int64_t device = 0; device < devices; device++) {
        regions().push_back(new Region(static_cast<c10::DeviceIndex>(device), capacity));
    }
    at::RegisterPrivateUse1HooksInterface(new Hooks);
}

std::vector<int64_t> statistics(int64_t device) {
    Region& found = region(device);
    const std::lock_guard<std::mutex> lock(found.mutex);
    return {found.bytes.current, found.bytes.peak, found.allocations, found.failures, found.blocks.current};
}

void reset_peak(int64_t device) {
    memory().resetPeakStats(static_cast<c10::DeviceIndex>(device));
}

void fail_allocation(int64_t device, int64_t number) {
    region(device).fail_at = number;
}

int64_t serial(int64_t address) {
    const void* place = reinterpret_cast<const void*>(address);
    return region(device_of(place)).serial(place);
}

int64_t set_device(int64_t device) {
    region(device);
    const c10::DeviceIndex before = current_device();
    current_device() = static_cast<c10::DeviceIndex>(device);
    return before;
}

TORCH_LIBRARY(sim, m) {
    m.def("_start(int devices, int capacity) -> ()", &start);
    m.def("_base(int device) -> int", [](int64_t device) { return reinterpret_cast<int64_t>(region(device).base); });
    m.def("_statistics(int device) -> int[]", &statistics);
    m.def("_reset_peak(int device) -> ()", &reset_peak);
    m.def("_fail_allocation(int device, int number) -> ()", &fail_allocation);
    m.def("_serial(int address) -> int", &serial);
    m.def("_set_device(int device) -> int", &set_device);
    m.def("_device() -> int", [] { return int64_t{current_device()}; });
    m.def("_stream(int device) -> int", [](int64_t device) {
        region(device);
        return current_stream(static_cast<c10::DeviceIndex>(device));
    });
    m.def("_default_generator(int device) -> Generator?", [](int64_t device) { return default_generator(device); });
    // Written in Python:
    m.def("_move(int to, int source, int count) -> ()");
    m.def("_record(int device, int stream, bool timed) -> int");
    m.def("_block(int device, int stream, int other_device, int other_stream, int sequence) -> ()");
    m.def("_is_done(int device, int stream, int sequence) -> bool");
    m.def("_wait(int device, int stream, int sequence) -> ()");
    m.def("_reached(int device, int stream, int sequence) -> float");
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("as_strided", &at::native::as_strided_tensorimpl);
    m.impl("view", &at::native::view);
    m.impl("_reshape_alias", &at::native::_reshape_alias);
    m.impl("unfold", &at::native::unfold);
    m.impl("view_as_real", &at::native::view_as_real);
    m.impl("view_as_complex", &at::native::view_as_complex);
    m.impl("resize_", &resize_);
    m.impl("set_", &set_nothing);
    m.impl("set_.source_Storage", &at::native::set_);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
    m.impl("set_.source_Tensor", &at::native::set_tensor_);
    m.impl("record_stream", &record_stream);
}

} // namespace
} // namespace sim
