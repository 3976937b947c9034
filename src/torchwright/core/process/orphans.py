"""Processes that end with the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """On Linux, end this process when `parent`, which started it, ends; even in the middle of a compilation.

    Elsewhere a worker ends when it next reads from the socket that its parent held.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this one asked
        os._exit(1)


def be_killed_first() -> None:
    """On Linux, have this process ended for want of memory before the one that started it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
