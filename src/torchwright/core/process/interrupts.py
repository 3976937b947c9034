"""Ctrl-C, `kill` and a closed terminal: noted besides being raised, and raised only where nothing is left half done.

Python raises KeyboardInterrupt wherever its main thread happens to be. In a destructor, a weak reference's callback or
an import lock's it is printed and lost, and the search goes on. On its way through C++ that calls Python, as torch's
start does, it ends the process with a core dump. Between a process's start and the line that stores the handle, it
leaves the process behind. So a signal is noted here first; within `deferred` it is only noted, and `check` raises it.

    with handled():            the command line: signals raise `Interrupted`
        with importing():      torch's start, in which nothing is held yet: signals end the process at once
        with deferred():       from the first temporary folder to the last
            check()            where the search waits, and before it begins something
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import NoReturn

from torchwright.core.process import ending
from torchwright.core.system import ending_signals

SIGNALS = ending_signals()
POLL_SECONDS = 0.2
"""Longest delay until an interrupt is seen whose exception was lost."""


Leave = Callable[["Interrupted"], NoReturn]


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command; `exit_code` is the shell's code for the signal, 130 for Ctrl-C."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        self.exit_code = 128 + number
        super().__init__("interrupted" if number == signal.SIGINT else f"ended by {self.signal.name}")


class Handler:
    """The signal handler of one block, with the record of a signal."""

    def __init__(self, leave: Leave | None) -> None:
        self.noted: int | None = None
        self.deferrals = 0
        self.importing = False
        self.told = False
        """True if the main thread has caught the interrupt and is exiting."""
        self._leave = leave

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.noted = number
        if self.importing and self._leave is not None:
            self._leave(Interrupted(number))
        if not self.deferrals:
            raise Interrupted(number)

    def takes(self, number: int) -> bool:
        """Check whether a signal is handled here, and not by a handler that came later."""
        return number in SIGNALS and signal.getsignal(number) is self

    def leave(self, number: int) -> None:
        """End the process; quietly if the main thread has reported the signal already."""
        interrupt = Interrupted(number)
        if self._leave is not None and not self.told:
            self._leave(interrupt)
        os._exit(interrupt.exit_code)

    @property
    def is_command(self) -> bool:
        return self._leave is not None

    def check(self) -> None:
        """Raise `Interrupted` for a signal that came."""
        if self.noted is not None:
            raise Interrupted(self.noted)


@contextlib.contextmanager
def handled(
    signals: Sequence[signal.Signals] = SIGNALS, *, leave: Leave | None = None
) -> Generator[None, None, None]:
    """Let `signals` raise `Interrupted` in this block; those that are ignored, as by `nohup`, stay so.

    `leave` is for the command itself: it says what ends the process, and ends it at once. What comes after the block is
    then Python's own end, in which an interrupt would do no more than print tracebacks: it is silent. A signal that the
    main thread does not answer in time ends the command all the same (`core/process/ending.py`).
    """
    if not _is_main():  # signals are the main thread's
        yield
        return
    handler = Handler(leave)
    watched = contextlib.nullcontext() if leave is None else ending.watched(handler.takes, handler.leave)
    # None: a handler that is not Python's and cannot be put back.
    before = {number: old for number in signals if (old := signal.getsignal(number)) is not None}
    before = {number: old for number, old in before.items() if old != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, handler)
        with watched:
            yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if leave else old)


@contextlib.contextmanager
def deferred() -> Generator[None, None, None]:
    """Only note signals in this block; `check`, and the block's end, raise them.

    Outside of the command line, Ctrl-C is handled so where Python's own handler would take it.
    """
    handler = _current()
    if handler is None and _is_main() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with handled([signal.SIGINT]), deferred():
            yield
        return
    if handler is None:  # the caller's own handler, or another thread's: what it does is its business
        yield
        return
    handler.deferrals += 1
    try:
        handler.check()
        yield
        handler.check()
    finally:
        handler.deferrals -= 1


@contextlib.contextmanager
def importing() -> Generator[None, None, None]:
    """Around imports of torch: a signal ends the command at once, and where it is not the command, is only noted."""
    handler = _current()
    if handler is None:
        yield
        return
    with deferred():
        handler.importing = True
        try:
            yield
        finally:
            handler.importing = False


def check() -> None:
    """Raise `Interrupted` if a signal was noted, also one whose exception was lost on the way."""
    handler = _current()
    if handler is not None:
        handler.check()


def answered(connection: Connection, seconds: float) -> bool:
    """Wait for an answer, and say whether it came in time; an interrupt ends the wait."""
    end = time.monotonic() + seconds
    while not connection.poll(min(POLL_SECONDS, max(0.0, end - time.monotonic()))):
        check()
        if time.monotonic() >= end:
            return False
    return True


def only_note() -> None:
    """Raise no more signals: what follows is the end."""
    handler = _current()
    if handler is not None:
        handler.deferrals += 1
        handler.told = True


def leave_now(code: int) -> None:
    """End an interrupted command without Python's shutdown, which takes seconds with torch.

    Its interrupt was reported, or its exit `code` says so: a training run has a handler of its own.
    """
    handler = _current()
    if handler is None or not handler.is_command:
        return
    number = handler.noted if handler.told else code - 128
    if number is None or number not in SIGNALS:
        return
    _flush()
    handler.told = True
    ending.end(number, handler.leave)


def end_command(code: int) -> None:
    """End a command that has closed all it held, without Python's own end: a second on a busy machine.

    Does nothing where the command line was called as a function.
    """
    handler = _current()
    if handler is not None and handler.is_command:
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _current() -> Handler | None:
    handlers = (signal.getsignal(number) for number in SIGNALS)
    return next((handler for handler in handlers if isinstance(handler, Handler)), None)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
