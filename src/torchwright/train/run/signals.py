"""Leaving when asked to: a run ends after the step that it is in."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Signals:
    """Notes the first SIGTERM or SIGINT; a second one ends the process at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def noted(self) -> Generator[None]:
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
