"""`torch.sim`: the functions that `torch.cuda` has for cards, for simulated devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import torchwright_sim
from torchwright_sim import NAME, registration, settings

_C: Any = torch._C
_bad_fork: list[bool] = []
Where = int | str | torch.device | None
"""A device: its number, its name, or None for the current one."""


class Properties(NamedTuple):
    """A device's properties."""

    name: str
    total_memory: int
    pid: int | None
    """The process's number, once there is one."""


# ------------------------------------------------------------------------------------------------------- being there


def is_available() -> bool:
    return torchwright_sim.fault() is None


def is_initialized() -> bool:
    return registration.is_started()


def _lazy_init() -> None:
    """Called by PyTorch before the first tensor lies on a device."""
    registration.start()


def init() -> None:
    registration.start()


def _is_in_bad_fork() -> bool:
    return bool(_bad_fork)


def _forked() -> None:
    if registration.is_started():
        _bad_fork.append(True)


os.register_at_fork(after_in_child=_forked)


def device_count() -> int:
    return settings.read().devices


def current_device() -> int:
    registration.start()
    return int(torch.ops.sim._device())


def set_device(device: Where) -> None:
    torch.ops.sim._set_device(_index(device))


def get_device_name(device: Where = None) -> str:
    return f"a simulated device ({NAME}:{_index(device)})"


def get_device_properties(device: Where = None) -> Properties:
    from torchwright_sim.driver import link

    found = link(_index(device))
    return Properties(get_device_name(device), found.chosen.memory, found.pid)


def get_device_capability(device: Where = None) -> tuple[int, int]:
    return 1, 0


class device:
    """Makes a device the current one within a `with` block."""

    def __init__(self, device: Where) -> None:
        self.idx = _index(device, default=-1)
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx >= 0:
            self.prev_idx = int(torch.ops.sim._set_device(self.idx))

    def __exit__(self, *error: object) -> None:
        if self.idx >= 0:
            torch.ops.sim._set_device(self.prev_idx)


class device_of(device):
    """Makes the device of a tensor the current one."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.device.type == NAME else -1)


# ----------------------------------------------------------------------------------------------------------- streams


class Stream(torch.Stream):
    """A stream of a simulated device."""

    def __new__(cls, device: Where = None, priority: int = 0, **parts: int) -> Stream:
        if parts:
            return super().__new__(cls, priority=priority, **parts)
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """Return an event: the number of a stream's last command when it is recorded."""
    # PyTorch takes no subclass where it asks for the time between two.
    registration.start()
    return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: Where = None) -> torch.Stream:
    index = _index(device)
    found = int(torch.ops.sim._stream(index))
    return Stream(stream_id=found, device_index=index, device_type=_type())


def default_stream(device: Where = None) -> torch.Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=_type())


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one of its device within a `with` block."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    with device(stream.device):
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


def synchronize(device: Where = None) -> None:
    """Wait until all that was launched on a device is done."""
    torch.ops.sim._wait(_index(device), -1, -1)


def _sleep(seconds: float, device: Where = None) -> None:
    """Keep the current stream busy, for tests of what does not wait for it."""
    from torchwright_sim.driver import link

    link(_index(device)).launch("sleep", {"seconds": seconds})


# ------------------------------------------------------------------------------------------------------------ memory


def memory_stats(device: Where = None) -> dict[str, int]:
    held, peak, allocations, failures, blocks = torch.ops.sim._statistics(_index(device))
    return {
        "allocated_bytes.all.current": held,
        "allocated_bytes.all.peak": peak,
        "allocation.all.allocated": allocations,
        "allocation.all.current": blocks,
        "num_ooms": failures,
    }


def memory_allocated(device: Where = None) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Where = None) -> int:
    return memory_stats(device)["allocated_bytes.all.peak"]


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: Where = None) -> None:
    torch.ops.sim._reset_peak(_index(device))


def mem_get_info(device: Where = None) -> tuple[int, int]:
    """Return free and total memory in bytes."""
    total = get_device_properties(device).total_memory
    return total - memory_allocated(device), total


def empty_cache() -> None:
    """Do nothing: memory that is freed is free at once."""


# ----------------------------------------------------------------------------------------------------------- numbers


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    if registration.is_started():
        _generator(None).manual_seed(int(seed))
    else:
        _seeds[:] = [int(seed)]


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices; before their first use that starts nothing."""
    if not registration.is_started():
        _seeds[:] = [int(seed)]
        return
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


_seeds: list[int] = []
"""A seed from before the devices were started."""


def started() -> None:
    """Take a seed that was given before the devices were started."""
    for seed in _seeds:
        manual_seed_all(seed)
    _seeds.clear()


def initial_seed() -> int:
    return _generator(None).initial_seed()


def get_rng_state(device: Where = NAME) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Where = NAME) -> None:
    _generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


def _generator(device: Where) -> torch.Generator:
    return torch.ops.sim._default_generator(_index(device))


def _type() -> int:
    return int(_C._autograd.DeviceType.PrivateUse1)


def _index(device: Where, default: int | None = None) -> int:
    """Return the number of a device of this type."""
    registration.start()
    if isinstance(device, int):
        return device
    place = torch.device(device) if device is not None else torch.device(NAME)
    if place.type != NAME:
        raise ValueError(f"torch.{NAME} was asked about the device '{place}'")
    if place.index is not None:
        return place.index
    return int(torch.ops.sim._device()) if default is None else default
