"""Forks that leave a usable child: thread pools end before a fork, and engines reopen after it.

A child of `fork` has its parent's memory and none of its threads. Whoever waits for a thread of the parent's waits
forever: GNU's OpenMP, which PyTorch computes with, and the thread pools of OpenVINO and ONNX Runtime.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import weakref
from pathlib import Path
from typing import Any, Protocol

HARD = 2
"""`omp_pause_hard` of OpenMP 5.0: end the pool's threads. The next parallel region starts new ones."""
OPENMP = re.compile(r"/\S*/libgomp[^/\s]*")


class Reopens(Protocol):
    """An object that holds threads or locks of this process."""

    def after_fork(self) -> None:
        """Forget what belongs to the parent. Runs in the child, before anything else does."""
        ...


_open: weakref.WeakSet[Reopens] = weakref.WeakSet()


def guard_forks() -> None:
    """Have children of `fork` compute: once for a process, and nothing happens until it forks."""
    _register()


def reopen_in_child(holder: Reopens) -> None:
    """Call `holder.after_fork` in every child of a fork."""
    guard_forks()
    _open.add(holder)


def never_freed(value: Any) -> None:
    """Keep an object until the process ends, and past the interpreter's own end.

    The destructors of OpenVINO and ONNX Runtime wait for threads, which a child of `fork` does not have.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@functools.cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_end_openmp, after_in_child=_reopen)


def _end_openmp() -> None:
    """End this thread's OpenMP pool: a child that finds its parent's waits for threads that do not exist."""
    if "torch" not in sys.modules or sys.platform != "linux":
        return
    for pause in _pauses(_libraries()):
        pause(HARD)


def _reopen() -> None:
    for holder in list(_open):
        holder.after_fork()


def _libraries() -> tuple[str, ...]:
    """The copies of GNU's OpenMP in this process: PyTorch brings its own, and a compiler's may lie next to it."""
    try:
        return tuple(sorted(set(OPENMP.findall(Path("/proc/self/maps").read_text(encoding="utf-8")))))
    except OSError:
        return ()


@functools.cache
def _pauses(libraries: tuple[str, ...]) -> list[Any]:
    """`omp_pause_resource_all` of each library that has it (GCC 9 and later)."""
    found: list[Any] = []
    for path in libraries:
        try:
            found.append(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL).omp_pause_resource_all)
        except (OSError, AttributeError):
            continue
    return found
