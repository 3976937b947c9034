"""Sums over the processes of one machine through memory that they share, some fifty times faster than through gloo.

`csrc/shared_ops.cpp` has the class and says how it works.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchwright.hardware.kernels.cpu import build

FOLDER = Path("/dev/shm")
"""Linux's file system in memory."""
ROOM = 1 << 18
"""Bytes of a process's slot: two of several processes stay in the second level of cache. More numbers take rounds."""
PATIENCE_S = 1800.0
"""Seconds after which a process that lives and does not come is given up, as in `torch.distributed`."""


def open_shared(*, patience_s: float = PATIENCE_S) -> tuple[Any, str]:
    """Return this process's `SharedMemory` with all others of the default process group; collective.

    None, with the reason, where any process cannot open it: on another machine, without compiled kernels, or without
    room in `FOLDER`. All processes get None then.
    """
    rank, ways = dist.get_rank(), dist.get_world_size()
    fault = build.load_fault()
    made: list[str | None] = [None, fault]
    if rank == 0 and fault is None:
        try:
            # A random name: a process of another machine finds no such file there, whatever else is alike.
            made = [_make_file(ways), None]
        except OSError as error:
            made = [None, f"{FOLDER}: {error.strerror}"]
    dist.broadcast_object_list(made)
    path, fault = made[0], fault or made[1]
    memory = None
    if path is not None and fault is None:
        try:
            memory = torch.classes.torchwright.SharedMemory(path, rank, ways, ROOM, patience_s)
        except RuntimeError as error:
            fault = str(error).splitlines()[0]
    faults: list[str | None] = [None] * ways
    dist.all_gather_object(faults, fault)
    if path is not None and rank == 0:
        os.unlink(path)  # it lasts for as long as somebody has it open
    wrong = next((f"process {other}: {said}" for other, said in enumerate(faults) if said is not None), None)
    return (memory, "") if wrong is None else (None, wrong)


def _make_file(ways: int, folder: Path = FOLDER) -> str:
    """Make the file of zeros in `folder` that all processes open. Raises `OSError` where the file system is full."""
    path = folder / f"torchwright-{secrets.token_hex(16)}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Pages that are missing later would end the process that writes them.
        os.posix_fallocate(file, 0, torch.classes.torchwright.SharedMemory.size(ways, ROOM))
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return str(path)
