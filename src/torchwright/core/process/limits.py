"""Time limits that interrupt running code."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Generator
from types import FrameType


class TimeIsUp(BaseException):
    """The time limit of a block has passed. No `Exception`, so that what runs in the block does not swallow it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raise `TimeIsUp` in the block after `seconds`; in a thread other than the main one, and on Windows, to its end.

    Another timer of the process is restored with its remaining time.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp

    handler = signal.signal(signal.SIGALRM, ring)
    begun = time.monotonic()
    left, every = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - begun)), every)
