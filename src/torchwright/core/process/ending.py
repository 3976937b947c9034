"""The end of a command whose main thread does not answer a signal in time.

Python runs a signal's handler between two instructions of its main thread, and a block may defer it: a conversion, a
compiler or a large operator keeps it waiting for minutes. A thread therefore hears of each signal at once, gives the
main thread `GRACE_SECONDS` to unwind, and then ends the process: children first, then folders that are not finished.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from torchwright.core import system

GRACE_SECONDS = 1.5
"""Time limit for the main thread to unwind. The end itself fits in the rest of five seconds."""

_unfinished: set[Path] = set()
"""Files and folders of this process that are not what somebody asked for."""


@contextlib.contextmanager
def unfinished(path: Path) -> Generator[None, None, None]:
    """Have `path` removed if the process is ended in this block."""
    hold(path)
    try:
        yield
    finally:
        let_go(path)


def hold(path: Path) -> None:
    """Have `path` removed if the process is ended, until `let_go`."""
    _unfinished.add(path)


def let_go(path: Path) -> None:
    _unfinished.discard(path)


@contextlib.contextmanager
def watched(ours: Callable[[int], bool], leave: Callable[[int], object]) -> Generator[None, None, None]:
    """Call `leave` with the number of a signal that came in this block, `GRACE_SECONDS` after it, in a thread.

    `ours` says of a signal whether its handler is that of the block; other handlers, as of a training run that still
    writes its checkpoint, take the time that they need. A signal that came keeps its deadline after the block: the end
    of Python waits for threads.
    """
    hear, tell = socket.socketpair()
    tell.setblocking(False)
    os.register_at_fork(before=_pause, after_in_parent=_go_on, after_in_child=_hear_nothing)
    before = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_wait, args=(hear, ours, leave), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        others = signal.set_wakeup_fd(before)
        if others != tell.fileno():  # of an event loop that is still there
            signal.set_wakeup_fd(others)
        tell.close()


def _wait(hear: socket.socket, ours: Callable[[int], bool], leave: Callable[[int], object]) -> None:
    with hear:
        while heard := hear.recv(1):
            if ours(heard[0]):
                break
        else:
            return
    threading.Event().wait(GRACE_SECONDS)
    end(heard[0], leave)


def end(number: int, leave: Callable[[int], object]) -> None:
    """End children and remove what is unfinished, then `leave`, which does not return."""
    for _ in range(3):  # the main thread may still start a process or write a file
        system.kill_descendants()
        for path in list(_unfinished):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
    leave(number)


_paused: list[int] = []
"""The descriptor that hears of signals, while the main thread forks."""


def _pause() -> None:
    with contextlib.suppress(ValueError):  # not the main thread
        _paused.append(signal.set_wakeup_fd(-1))


def _go_on() -> None:
    if _paused:
        signal.set_wakeup_fd(_paused.pop(), warn_on_full_buffer=False)


def _hear_nothing() -> None:
    """In a forked child: its signals are not ours. The socket would carry them to the parent."""
    _paused.clear()
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
