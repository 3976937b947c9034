// Device memory as the host sees it: addresses in a reserved range that no process may read, first fit within a capacity.
// The bytes themselves belong to the device's process.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "driver.h"

namespace sim {

constexpr int64_t kAlignment = 512; // as CUDA's allocator rounds: every dtype and vector load is aligned

struct Region;

struct Block {
    Region* region;
    int64_t offset;
    int64_t size;
    int64_t serial;
};

// The memory of one device.
struct Region {
    Region(c10::DeviceIndex device, int64_t capacity) : device(device), capacity(capacity) {
        void* reserved = mmap(nullptr, capacity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        TORCH_CHECK(reserved != MAP_FAILED, "no address range of ", capacity, " bytes is left for sim:", int(device));
        base = static_cast<char*>(reserved);
        gaps[0] = capacity;
    }

    c10::DataPtr allocate(int64_t wanted);
    void release(const Block& block);

    bool contains(const void* address) const {
        return address >= base && address < base + capacity;
    }

    // The number of the allocation that an address lies in, or -1: an address is used again, a number is not.
    int64_t serial(const void* address) {
        const std::lock_guard<std::mutex> lock(mutex);
        const int64_t offset = static_cast<const char*>(address) - base;
        auto next = taken.upper_bound(offset);
        return next == taken.begin() ? -1 : std::prev(next)->second->serial;
    }

    const c10::DeviceIndex device;
    const int64_t capacity;
    char* base;
    std::mutex mutex;
    std::map<int64_t, int64_t> gaps; // offset -> size
    std::map<int64_t, Block*> taken;
    c10::CachingAllocator::Stat bytes, blocks;
    int64_t allocations = 0, failures = 0, fail_at = 0;

   private:
    [[noreturn]] void refuse(int64_t wanted, const char* reason) const;
};

inline void release_block(void* context) {
    auto* block = static_cast<Block*>(context);
    block->region->release(*block);
    delete block;
}

inline void Region::refuse(int64_t wanted, const char* reason) const {
    int64_t largest = 0;
    for (const auto& [offset, size] : gaps) {
        largest = std::max(largest, size);
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "sim out of memory. Tried to allocate ",
        wanted,
        " bytes on sim:",
        int(device),
        ", which has ",
        capacity,
        " bytes, of which ",
        capacity - bytes.current,
        " are free and the largest gap is ",
        largest,
        reason);
}

inline c10::DataPtr Region::allocate(int64_t wanted) {
    const c10::Device place(c10::DeviceType::PrivateUse1, device);
    if (wanted == 0) {
        return {nullptr, place};
    }
    const int64_t size = (wanted + kAlignment - 1) / kAlignment * kAlignment;
    const std::lock_guard<std::mutex> lock(mutex);
    if (++allocations == fail_at) {
        failures++;
        refuse(wanted, " (a fault that TORCHWRIGHT_SIM asked for)");
    }
    auto gap = std::find_if(gaps.begin(), gaps.end(), [size](const auto& each) { return each.second >= size; });
    if (gap == gaps.end()) {
        failures++;
        refuse(wanted, "");
    }
    const auto [offset, length] = *gap;
    gaps.erase(gap);
    if (length > size) {
        gaps[offset + size] = length - size;
    }
    auto* block = new Block{this, offset, size, allocations};
    taken[offset] = block;
    bytes.increase(size);
    blocks.increase(1);
    return {base + offset, block, &release_block, place};
}

inline void Region::release(const Block& block) {
    const std::lock_guard<std::mutex> lock(mutex);
    taken.erase(block.offset);
    bytes.decrease(block.size);
    blocks.decrease(1);
    auto here = gaps.emplace(block.offset, block.size).first;
    auto next = std::next(here);
    if (next != gaps.end() && here->first + here->second == next->first) {
        here->second += next->second;
        gaps.erase(next);
    }
    if (here != gaps.begin()) {
        auto before = std::prev(here);
        if (before->first + before->second == here->first) {
            before->second += here->second;
            gaps.erase(here);
        }
    }
}

// Regions live as long as the process: tensors may be freed after everything else at its end.
inline std::vector<Region*>& regions() {
    static auto* all = new std::vector<Region*>;
    return *all;
}

inline Region& region(int64_t device) {
    TORCH_CHECK(
        device >= 0 && device < static_cast<int64_t>(regions().size()),
        "invalid device sim:",
        device,
        ": this process has ",
        regions().size(),
        " simulated devices");
    return *regions()[device];
}

inline c10::DeviceIndex device_of(const void* address) {
    for (const Region* each : regions()) {
        if (each->contains(address)) {
            return each->device;
        }
    }
    TORCH_CHECK(false, "the address ", address, " lies on no simulated device");
}

inline c10::DeviceIndex& current_device() {
    static thread_local c10::DeviceIndex device = 0;
    return device;
}

// What is freed is free at once: nothing is reserved beyond it, and no stream's use is recorded.
struct Memory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t size) override {
        return region(current_device()).allocate(static_cast<int64_t>(size));
    }
    c10::DeleterFnPtr raw_deleter() const override {
        return nullptr; // a block needs its context to be freed
    }
    void copy_data(void* to, const void* from, size_t count) const override {
        driver::move(to, from, static_cast<int64_t>(count));
    }

    bool initialized() override {
        return !regions().empty();
    }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr&, c10::Stream) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        Region& found = region(device);
        const std::lock_guard<std::mutex> lock(found.mutex);
        constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
        c10::CachingDeviceAllocator::DeviceStats stats;
        stats.allocated_bytes[kAll] = stats.reserved_bytes[kAll] = stats.active_bytes[kAll] = found.bytes;
        stats.allocation[kAll] = stats.active[kAll] = found.blocks;
        stats.num_ooms = found.failures;
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex device) override {
        Region& found = region(device);
        const std::lock_guard<std::mutex> lock(found.mutex);
        found.bytes.reset_accumulated();
        found.blocks.reset_accumulated();
    }
    void resetPeakStats(c10::DeviceIndex device) override {
        Region& found = region(device);
        const std::lock_guard<std::mutex> lock(found.mutex);
        found.bytes.reset_peak();
        found.blocks.reset_peak();
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        Region& found = region(device);
        const std::lock_guard<std::mutex> lock(found.mutex);
        return {found.capacity - found.bytes.current, found.capacity};
    }
};

inline Memory& memory() {
    static auto* only = new Memory;
    return *only;
}

// Gives a storage another size and keeps the bytes that both have.
inline void resize_storage(c10::StorageImpl* storage, int64_t size) {
    const c10::DeviceIndex device = storage->device().index();
    c10::DataPtr grown = region(device).allocate(size);
    const int64_t kept = std::min<int64_t>(size, storage->nbytes());
    if (kept > 0) {
        driver::move(grown.get(), storage->data(), kept);
    }
    storage->set_data_ptr_noswap(std::move(grown));
    storage->set_nbytes(size);
}

// Host memory that copies may read and write after the call that asked for them.
struct Pinned final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        if (size == 0) {
            return {nullptr, c10::Device(c10::DeviceType::CPU)};
        }
        void* data = c10::alloc_cpu(size);
        const std::lock_guard<std::mutex> lock(mutex);
        ranges[static_cast<char*>(data)] = size;
        return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override {
        return &release;
    }
    void copy_data(void* to, const void* from, size_t count) const override {
        default_copy_data(to, from, count);
    }
    bool holds(const void* data) {
        const std::lock_guard<std::mutex> lock(mutex);
        auto next = ranges.upper_bound(static_cast<char*>(const_cast<void*>(data)));
        if (next == ranges.begin()) {
            return false;
        }
        const auto& [start, size] = *std::prev(next);
        return static_cast<const char*>(data) < start + size;
    }
    static void release(void* data);

    std::mutex mutex;
    std::map<char*, size_t> ranges;
};

inline Pinned& pinned() {
    static auto* only = new Pinned;
    return *only;
}

inline void Pinned::release(void* data) {
    {
        const std::lock_guard<std::mutex> lock(pinned().mutex);
        pinned().ranges.erase(static_cast<char*>(data));
    }
    c10::free_cpu(data);
}

} // namespace sim
