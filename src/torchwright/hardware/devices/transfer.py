"""Copies between the host and an asynchronous device, for which nobody waits longer than for the copy itself.

A plain copy waits for all that was launched on the device before it. One from or to pinned memory takes its turn there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device of a tensor on the host; what is launched next may read it."""
    if not _copies_asynchronously(device):
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def begin_fetch(values_N: torch.Tensor) -> Callable[[], list[int]]:
    """Begin to copy integers to the host; the returned function waits for the copy, and for nothing behind it."""
    if not _copies_asynchronously(values_N.device):
        return values_N.tolist
    host_N = torch.empty(values_N.shape, dtype=values_N.dtype, pin_memory=True)
    host_N.copy_(values_N, non_blocking=True)
    copied = torch.Event(values_N.device)
    copied.record()

    def fetched() -> list[int]:
        copied.synchronize()
        return host_N.tolist()

    return fetched


def _copies_asynchronously(device: torch.device) -> bool:
    """Check whether the device is this process's accelerator, for which PyTorch pins memory."""
    if device.type == "cpu":
        return False
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type
