// Calls from C++ to the driver, which is written in Python: operators of the namespace `sim` that `driver.py` implements.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace sim::driver {

template <class Result, class... Arguments>
Result call(const char* name, Arguments... arguments) {
    // Calls of the runtime are no part of a program: modes that trace or fake operators must not see them.
    const c10::impl::ExcludeDispatchKeyGuard unseen(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Fake}));
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(name, "")
        .template typed<Result(Arguments...)>()
        .call(arguments...);
}

// Copies bytes between addresses of one device, in the order of its current stream.
inline void move(void* to, const void* from, int64_t count) {
    call<void, int64_t, int64_t, int64_t>(
        "sim::_move", reinterpret_cast<int64_t>(to), reinterpret_cast<int64_t>(from), count);
}

// The number of the last command of a stream so far.
inline int64_t record(int64_t device, int64_t stream, bool timed) {
    return call<int64_t, int64_t, int64_t, bool>("sim::_record", device, stream, timed);
}

// Has a stream wait for a command of another, which may be another device's.
inline void block(int64_t device, int64_t stream, int64_t other_device, int64_t other_stream, int64_t sequence) {
    call<void, int64_t, int64_t, int64_t, int64_t, int64_t>(
        "sim::_block", device, stream, other_device, other_stream, sequence);
}

inline bool is_done(int64_t device, int64_t stream, int64_t sequence) {
    return call<bool, int64_t, int64_t, int64_t>("sim::_is_done", device, stream, sequence);
}

// Waits for a command; for the last one of a stream, or of all, where the number, or the stream, is negative.
inline void wait(int64_t device, int64_t stream, int64_t sequence) {
    call<void, int64_t, int64_t, int64_t>("sim::_wait", device, stream, sequence);
}

// When a timed mark was reached, in milliseconds of the machine's clock.
inline double reached(int64_t device, int64_t stream, int64_t sequence) {
    return call<double, int64_t, int64_t, int64_t>("sim::_reached", device, stream, sequence);
}

} // namespace sim::driver
