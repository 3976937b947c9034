"""When this process began, and what started it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The process that started this one, and starts it again when it dies."""

    pid: int
    wall: int
    """Nanoseconds since 1970 at which it began."""
    restarts: int
    """Number of restarts of its processes."""


def torchrun(parent: int | None = None) -> Launcher | None:
    """Return the torchrun that is this process's parent, or the given one; None without one, or if it has died.

    torchrun as the first process of a container looks like a parent that died.
    """
    restarts, parent = os.environ.get("TORCHELASTIC_RESTART_COUNT"), parent or os.getppid()
    if restarts is None or parent == 1:
        return None
    return Launcher(pid=parent, wall=int(process_started(parent) * 1e9), restarts=int(restarts))


def process_started(pid: int | None = None) -> float:
    """The wall clock at which a process, or this one, began: seconds since 1970, to a hundredth of a second (Linux)."""
    with open(f"/proc/{pid or 'self'}/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # the 22nd field, counted from the pid
    alive = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - alive
