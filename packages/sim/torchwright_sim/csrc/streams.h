// The current device and stream of each thread, events by sequence number, and the hooks of an accelerator.

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

#include "memory.h"

namespace sim {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 64;
constexpr int64_t kStreams = 16; // beside the default one; a device's process has a thread for each that is used

inline c10::StreamId& current_stream(c10::DeviceIndex device) {
    static thread_local std::array<c10::StreamId, kMostDevices> streams{};
    return streams.at(device);
}

inline c10::StreamId next_stream() {
    static std::atomic<int64_t> given{0};
    return given++ % kStreams + 1;
}

// A moment of a stream: the number of the last command before it.
struct Event {
    c10::DeviceIndex device;
    c10::StreamId stream;
    int64_t sequence;
    bool timed;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override {
        return kType;
    }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override {
        return {kType, current_device()};
    }
    void setDevice(c10::Device device) const override {
        if (device.index() >= 0) {
            region(device.index()); // refuses a number that no device has
            current_device() = device.index();
        }
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.index() >= 0) {
            current_device() = device.index();
        }
    }
    // Every type of the CPU but those of quantized tensors.
    c10::DeviceCapability getDeviceCapability(c10::Device) const override {
        c10::DeviceCapability found;
        auto& types = found.capability_data.supported_scalar_types;
        types.has_QInt8 = types.has_QUInt8 = types.has_QInt32 = types.has_QUInt4x2 = types.has_QUInt2x4 = 0;
        return found;
    }
    c10::DeviceIndex deviceCount() const noexcept override {
        return static_cast<c10::DeviceIndex>(regions().size());
    }

    c10::Stream getStream(c10::Device device) const override {
        const c10::Device place = numbered(device);
        return c10::Stream(c10::Stream::UNSAFE, place, current_stream(place.index()));
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return c10::Stream(c10::Stream::DEFAULT, numbered(device));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return c10::Stream(c10::Stream::UNSAFE, numbered(device), next_stream());
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return getStreamFromGlobalPool(device, false);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        const c10::Stream before = getStream(stream.device());
        current_stream(stream.device_index()) = stream.id();
        return before;
    }
    bool queryStream(const c10::Stream& stream) const override {
        return driver::is_done(stream.device_index(), stream.id(), -1);
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        driver::wait(stream.device_index(), stream.id(), -1);
    }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        driver::wait(device < 0 ? current_device() : device, -1, -1);
    }

    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag)
        const override {
        if (*event == nullptr) {
            *event = new Event{};
        }
        auto* found = static_cast<Event*>(*event);
        found->device = stream.device_index();
        found->stream = stream.id();
        found->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
        found->sequence = driver::record(found->device, found->stream, found->timed);
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (const auto* found = static_cast<Event*>(event)) {
            driver::block(stream.device_index(), stream.id(), found->device, found->stream, found->sequence);
        }
    }
    bool queryEvent(void* event) const override {
        const auto* found = static_cast<Event*>(event);
        return found == nullptr || driver::is_done(found->device, found->stream, found->sequence);
    }
    void synchronizeEvent(void* event) const override {
        if (const auto* found = static_cast<Event*>(event)) {
            driver::wait(found->device, found->stream, found->sequence);
        }
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
        const auto *from = static_cast<Event*>(first), *to = static_cast<Event*>(last);
        TORCH_CHECK(from && to, "both events must be recorded before the time between them is asked for");
        TORCH_CHECK(from->timed && to->timed, "both events must be made with enable_timing=True");
        return driver::reached(to->device, to->stream, to->sequence) -
            driver::reached(from->device, from->stream, from->sequence);
    }

   private:
    c10::Device numbered(c10::Device device) const {
        return device.has_index() ? device : getDevice();
    }
};

// Draws as the CPU's generator does; the state travels to the device's process with each operator that draws.
struct Generator final : at::CPUGeneratorImpl {
    explicit Generator(c10::DeviceIndex device) {
        device_ = c10::Device(kType, device);
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    }

   private:
    Generator* clone_impl() const override {
        auto* copy = new Generator(device_.index());
        copy->set_state(*get_state());
        return copy;
    }
};

inline const at::Generator& default_generator(int64_t device) {
    static auto* all = [] {
        auto* made = new std::vector<at::Generator>;
        for (const Region* each : regions()) {
            made->push_back(at::make_generator<Generator>(each->device));
        }
        return made;
    }();
    region(device);
    return (*all)[device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override {
        return true;
    }
    bool isAvailable() const override {
        return !regions().empty();
    }
    bool hasPrimaryContext(c10::DeviceIndex) const override {
        return true;
    }
    c10::DeviceIndex deviceCount() const override {
        return static_cast<c10::DeviceIndex>(regions().size());
    }
    c10::DeviceIndex getCurrentDevice() const override {
        return current_device();
    }
    void setCurrentDevice(c10::DeviceIndex device) const override {
        region(device);
        current_device() = device;
    }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        const c10::DeviceIndex before = current_device();
        setCurrentDevice(device);
        return before;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return device < 0 ? current_device() : exchangeDevice(device);
    }
    c10::Device getDeviceFromPtr(void* data) const override {
        return {kType, device_of(data)};
    }
    bool isPinnedPtr(const void* data) const override {
        return pinned().holds(data);
    }
    c10::Allocator* getPinnedMemoryAllocator() const override {
        return &pinned();
    }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device < 0 ? current_device() : device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override {
        return at::make_generator<Generator>(device < 0 ? current_device() : device);
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
        resize_storage(storage.unsafeGetStorageImpl(), static_cast<int64_t>(size));
    }
};

} // namespace sim
