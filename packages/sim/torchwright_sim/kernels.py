"""Registers the operators written in Python with PyTorch's dispatcher."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchwright_sim import attention, collectives, copies, operators, recurrent
from torchwright_sim.driver import link

CONVOLUTIONS = ("convolution", "convolution_backward")
"""PyTorch composes them of operators that another package has to bring; the CPU has them under these names."""

_libraries: list[torch.library.Library] = []
"""Kept: a registration ends with its library."""


def register() -> None:
    """Send what has no kernel of its own to the device, by name."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(operators.run, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in (*CONVOLUTIONS, *_with_kernels(), *_foreach()):
        aten.impl(name, functools.partial(operators.run, _overload(name)))
    aten.impl("_copy_from", copies.copy_from)
    aten.impl("_copy_from_and_resize", copies.copy_from_and_resize)
    aten.impl("_local_scalar_dense", copies.number)
    attention.register(aten)
    keyed = torch.library.Library("aten", "IMPL")
    recurrent.register(keyed)
    for key in ("Conjugate", "Negative"):
        # A pending conjugation is resolved by a copy: without this the copy would ask for one, without end.
        keyed.impl("_copy_from", torch.library.fallthrough_kernel, key)
        keyed.impl("_copy_from_and_resize", torch.library.fallthrough_kernel, key)
    runtime = torch.library.Library("sim", "IMPL")
    for name, function in RUNTIME.items():
        runtime.impl(name, function, "CompositeImplicitAutograd")
    _libraries.extend((everything, aten, keyed, runtime, *collectives.register()))


def _with_kernels() -> list[str]:
    """Return operators that PyTorch composes here and not on the CPU, whose kernel gives the CPU's bits."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composed = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return sorted(
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and has(name, "CPU")
        and any(has(name, key) for key in composed)
        and not has(name, "PrivateUse1")
        and not operators.plan(_overload(name.removeprefix("aten::"))).views
    )


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
"""Questions of the compiled part to the driver; see csrc/driver.h."""
