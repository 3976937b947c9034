"""SIGTERM and Ctrl-C in a training run: the run saves a checkpoint and leaves within seconds.

A process that is alone drops the evaluation in progress, and the step where that has changed nothing yet. Several
processes agree at the end of a step: within one they wait for each other.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Leaving(BaseException):
    """A signal asked to leave: what is computed in this block is dropped."""


class Signals:
    """Notes the first SIGTERM or SIGINT; a second one ends the process at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._dropping = False

    @contextmanager
    def noted(self) -> Generator[None]:
        """Take the signals meanwhile. In a thread of another program they stay that program's."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def dropping(self) -> Generator[None]:
        """Raise `Leaving` when a signal comes in this block, and at its start if one came before."""
        self._dropping = True
        try:
            if self.number is not None:
                raise Leaving
            yield
        finally:
            self._dropping = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
        if self._dropping:
            raise Leaving
