"""Memory for what kernels stream: huge pages, which prefetching crosses and address look-ups do not slow down."""

from __future__ import annotations

import ctypes
import mmap
from io import FileIO
from math import prod
from typing import Any

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


def read(file: FileIO, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a file's bytes from `offset` on, in memory of its own.

    A mapping would be read through a fault for every few pages, which takes longer than the copy. Raises `OSError`
    where the file ends before the tensor.
    """
    tensor = zeros(shape, dtype)
    flat: Any = tensor.flatten().view(torch.uint8).numpy()
    room = memoryview(flat)
    file.seek(offset)
    while room:
        count = file.readinto(room)
        if not count:
            raise OSError(f"{file.name} ends {len(room):,} bytes too early")
        room = room[count:]
    return tensor
