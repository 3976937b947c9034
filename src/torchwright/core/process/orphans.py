"""Processes that end with the one that started them.

`python -m torchwright.core.process.orphans PARENT MODULE …` runs a module so from its first import on. Importing torch
or xgrammar takes seconds, and on a busy machine a minute; until then the module itself could not ask for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
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


def bound_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process which ends with this one."""
    return [sys.executable, "-m", "torchwright.core.process.orphans", str(os.getpid()), module, *arguments]


def be_killed_first() -> None:
    """On Linux, have this process ended for want of memory before the one that started it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


def main() -> None:
    _, parent, module, *arguments = sys.argv
    die_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
