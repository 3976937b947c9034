"""Copies between host and devices, and among devices."""

from __future__ import annotations

from typing import Any

import torch

from torchwright_sim import NAME, wire
from torchwright_sim.driver import link
from torchwright_sim.operators import place

_sim: Any = torch.ops.sim


def copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy a tensor's contents; one of the two lies on a simulated device."""
    if not to.numel():
        return to
    if source.device.type == "cpu":
        _write(source, to)
    elif to.device.type == "cpu":
        _read(source, to, non_blocking and to.is_pinned())
    elif source.device.type != NAME or to.device.type != NAME:
        raise NotImplementedError(f"a copy from {source.device} to {to.device} has to go through the CPU")
    elif source.device == to.device:
        _copy(source, to)
    else:  # as with cards that reach each other through the host alone
        host = torch.empty(source.size(), dtype=source.dtype)
        _read(source, host, False)
        _write(host, to)
    return to


def copy_from_and_resize(source: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Copy a tensor's contents to one that takes its shape."""
    if to.size() != source.size():
        to.resize_(source.size())
    return copy_from(source, to)


def number(tensor: torch.Tensor) -> Any:
    """Return the value of a tensor of one element."""
    host = torch.empty(tensor.size(), dtype=tensor.dtype)
    _read(tensor, host, False)
    return host.item()


def move(to: int, source: int, count: int) -> None:
    """Copy bytes between addresses of one device."""
    device = link(_device_of(to))
    device.launch("move", {"to": to - device.base, "from": source - device.base, "count": count})


def _device_of(address: int) -> int:
    from torchwright_sim.driver import links

    return next(each.index for each in links() if 0 <= address - each.base < each.chosen.memory)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _write(source: torch.Tensor, to: torch.Tensor) -> None:
    device = link(to.device.index)
    device.check("aten::copy_", [], [_storage(to)])
    # In the device's dtype, as the host would convert it.
    host = source.detach().to(to.dtype).resolve_conj().resolve_neg().contiguous()
    header = {"to": place(to).encode(), "dtype": wire.name(host.dtype), "size": tuple(host.size())}
    # The bytes are sent now: the source may change afterwards.
    device.launch("write", header, wire.raw(host), held=to)


def _read(source: torch.Tensor, to: torch.Tensor, later: bool) -> None:
    device = link(source.device.index)
    device.check("aten::copy_", [_storage(source)], [])
    header = {"from": place(source).encode()}

    def arrive(reply: dict[str, Any], payload: bytearray) -> None:
        to.copy_(wire.from_raw(payload, source.dtype, tuple(source.size())))

    if later:  # it arrives when somebody waits for it, and not before
        device.launch("read", header, held=(source, to), finish=arrive)
        return
    reply, payload = device.call("read", header, held=source)
    arrive(reply, payload)
    device.host_waited(reply["s"], reply["n"])


def _copy(source: torch.Tensor, to: torch.Tensor) -> None:
    device = link(to.device.index)
    device.check("aten::copy_", [_storage(source)], [_storage(to)])
    header = {"from": place(source).encode(), "to": place(to).encode()}
    device.launch("copy", header, held=(source, to))
