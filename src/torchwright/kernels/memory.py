"""Memory for what kernels stream: huge pages, which prefetching crosses and address look-ups do not slow down."""

from __future__ import annotations

import ctypes
import mmap
from math import prod

import torch

HUGE = 2 << 20
"""Bytes of a huge page; smaller tensors stay where they are."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU that take memory only once they are written (`torch.zeros` writes them all).

    They start at a huge page's boundary, and lie in huge pages where the system grants them.
    """
    count = prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    size = count * dtype.itemsize
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has none
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def lasting(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, in huge pages where it is large enough to fill some."""
    if tensor.nbytes < HUGE or tensor.device.type != "cpu":
        return tensor.clone()
    return zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor)
