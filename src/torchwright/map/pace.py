"""The pace of a run, from which `--dry-run` says how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Pace:
    """The time that parts take, with the waits of their workers for rows and for the writing of answers.

    Each worker's first part counts with the time that it was computed; what passed before that is the start. From then
    on the time between one finished part and the next counts, once for each worker.
    """

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        """To be made when the workers are started."""
        self._workers, self._clock = workers, clock
        self._last = clock()
        self._parts = 0
        self._unnoted = dict[str, float]()

    def take(self, *, rows: int, size: int, computed_seconds: float) -> None:
        """Count a part of `size` bytes whose answers are written."""
        now = self._clock()
        if not self._parts:
            self._add(starts=1, start_seconds=max(0.0, now - self._last - computed_seconds))
        self._parts += 1
        passed = computed_seconds if self._parts <= self._workers else (now - self._last) * self._workers
        self._last = now
        self._add(rows=rows, bytes=size, seconds=passed, worker_seconds=computed_seconds)

    def note(self) -> dict[str, float]:
        """Return what was counted since the last note."""
        noted, self._unnoted = self._unnoted, {}
        return noted

    def _add(self, **counted: float) -> None:
        for name, value in counted.items():
            self._unnoted[name] = self._unnoted.get(name, 0) + value


def estimated(measured: Mapping[str, float], size: int, workers: int) -> tuple[float, float] | None:
    """Return the seconds that parts of `size` bytes take, and the rows/s; None where nothing was measured.

    `measured` are the sums of notes.
    """
    if not measured.get("bytes") or not measured.get("seconds"):
        return None
    start = measured["start_seconds"] / measured["starts"] if size else 0.0
    seconds = start + measured["seconds"] * size / measured["bytes"] / workers
    return seconds, workers * measured["rows"] / measured["seconds"]
