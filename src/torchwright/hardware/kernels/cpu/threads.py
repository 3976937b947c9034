"""Whose threads the kernels share their work on: those of PyTorch's pool, or their own.

PyTorch's are OpenMP's. Each of its parallel regions ends when all of them have come to its end: on a machine that is
busy with other work every operator waits for the descheduled thread. When it has ended they keep their cores for
milliseconds. The kernels' own (`csrc/pool.h`) do neither. Both at once would fight for the cores, so the own ones are
for a model that runs on kernels alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

native: Any = torch.ops.torchwright


@contextmanager
def own_threads(count: int | None = None) -> Iterator[None]:
    """This thread's kernels on `count` threads with it, PyTorch's operators on it alone.

    As many as PyTorch has, where no number is given.
    """
    with torch_threads(1) as before:
        outer = native.own_threads(count or before)
        try:
            yield
        finally:
            native.own_threads(outer)


@contextmanager
def torch_threads(count: int | None) -> Iterator[int]:
    """PyTorch's pool with `count` threads, where one is given; yields how many it had, and has again afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield before
    finally:
        torch.set_num_threads(before)
