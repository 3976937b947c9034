"""Registers the operators written in Python with PyTorch's dispatcher."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchwright_sim import attention, collectives, copies, operators
from torchwright_sim.driver import link

DIRECT = ("convolution", "convolution_backward", "native_layer_norm", "native_group_norm")
"""Operators that PyTorch would compose of others for an unknown device: the CPU's kernel gives the CPU's bits."""

_libraries: list[torch.library.Library] = []
"""Kept: a registration ends with its library."""


def register() -> None:
    """Send what has no kernel of its own to the device, by name."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(operators.run, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in (*DIRECT, *_foreach()):
        aten.impl(name, functools.partial(operators.run, _overload(name)))
    aten.impl("_copy_from", copies.copy_from)
    aten.impl("_copy_from_and_resize", copies.copy_from_and_resize)
    aten.impl("_local_scalar_dense", copies.number)
    attention.register(aten)
    runtime = torch.library.Library("sim", "IMPL")
    for name, function in RUNTIME.items():
        runtime.impl(name, function, "CompositeImplicitAutograd")
    _libraries.extend((everything, aten, runtime, *collectives.register()))


def _foreach() -> list[str]:
    """Return the operators on lists of tensors: one command, and not one for each tensor."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("aten::") for name in names if name.startswith("aten::_foreach_"))


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _record(device: int, stream: int, timed: bool) -> int:
    return link(device).record(stream, timed)


def _block(device: int, stream: int, other_device: int, other_stream: int, sequence: int) -> None:
    link(device).block(stream, link(other_device), other_stream, sequence)


def _is_done(device: int, stream: int, sequence: int) -> bool:
    return link(device).is_done(stream, sequence)


def _wait(device: int, stream: int, sequence: int) -> None:
    link(device).wait(stream, sequence)


def _reached(device: int, stream: int, sequence: int) -> float:
    return link(device).reached(stream, sequence)


RUNTIME = {
    "_move": copies.move,
    "_record": _record,
    "_block": _block,
    "_is_done": _is_done,
    "_wait": _wait,
    "_reached": _reached,
}
"""What the compiled part asks the driver; see csrc/driver.h."""
