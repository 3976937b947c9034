"""Detect whether other programs take the cores that the engine computes on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("torchwright.serve")

MEMORY_S = 1.0
"""Time after which a step counts a third of what the latest does."""
BUSY, FREE = 0.7, 0.9
"""Shares below and above which the log says so."""


class CoreShare:
    """The share of its time in which the engine's thread had a core: 1 on a free machine.

    A descheduled thread does not run, nor does one that waits for a descheduled helper. `clock` and `ran` are
    seconds: of the day, and of this thread's processor time.
    """

    def __init__(self, clock: Callable[[], float], ran: Callable[[], float]) -> None:
        self._clock, self._ran = clock, ran
        self._lasted_s = self._had_s = 0.0
        self._busy = False

    @property
    def value(self) -> float:
        return min(1.0, self._had_s / self._lasted_s) if self._lasted_s else 1.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """The block is computation, and waits for nothing but its cores."""
        began, had = self._clock(), self._ran()
        yield
        lasted = self._clock() - began
        kept = math.exp(-lasted / MEMORY_S)
        self._lasted_s = self._lasted_s * kept + lasted
        self._had_s = self._had_s * kept + self._ran() - had
        if self._lasted_s >= MEMORY_S / 2 and self._busy != (self.value < (FREE if self._busy else BUSY)):
            self._tell()

    def _tell(self) -> None:
        self._busy = not self._busy
        if self._busy:
            log.warning(
                "other programs take the cores: the engine has one in %.0f%% of its time", 100 * self.value
            )
        else:
            log.warning("the engine has its cores to itself again")
