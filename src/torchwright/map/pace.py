"""The pace of a run, from which `--dry-run` says how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Pace:
    """The time that parts take, with the waits of their workers for rows and for the writing of answers.

    Each worker's first part is counted apart, with the time that it was computed: a worker is slower at first. What
    passed before that is the start. Then the time between one finished part and the next counts. It counts once for
    each worker that had a part, or could have had one.
    """

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        """To be made when the workers are started."""
        self._workers, self._clock = workers, clock
        self._last = clock()
        self._parts = self._under_way = 0
        self._all_begun = False
        self._unnoted = dict[str, float]()

    def begin(self) -> None:
        """Count a part that was given to the workers."""
        self._under_way += 1

    def all_begun(self) -> None:
        """From now on a worker that has finished waits for nothing more."""
        self._all_begun = True

    def take(self, *, rows: int, size: int, computed_seconds: float) -> None:
        """Count a part of `size` bytes whose answers are written."""
        now = self._clock()
        if not self._parts:
            self._add(starts=1, start_seconds=max(0.0, now - self._last - computed_seconds))
        self._parts += 1
        if self._parts <= self._workers:
            self._add(firsts=1, first_bytes=size, first_seconds=computed_seconds)
        else:
            busy = min(self._workers, self._under_way) if self._all_begun else self._workers
            self._add(bytes=size, seconds=(now - self._last) * busy)
        self._add(rows=rows, worker_seconds=computed_seconds)
        self._under_way -= 1
        self._last = now

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
    if not measured.get("first_bytes") or not measured.get("first_seconds"):
        return None
    start = measured["start_seconds"] / measured["starts"]
    pace = measured["first_seconds"] / measured["first_bytes"]
    if measured.get("bytes"):
        pace = measured["seconds"] / measured["bytes"]
        slower = measured["first_seconds"] - pace * measured["first_bytes"]
        start += max(0.0, slower / measured["firsts"])
    bytes_a_row = (measured["first_bytes"] + measured.get("bytes", 0)) / measured["rows"]
    seconds = start + pace * size / workers if size else 0.0
    return seconds, workers / (pace * bytes_a_row)
