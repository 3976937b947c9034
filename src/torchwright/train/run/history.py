"""What a run has told so far, read from its metrics.jsonl while it may still be writing (no torch)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchwright.train.run.data_section import RunError
from torchwright.train.run.metrics import FILE

COUNTED = ("tokens", "samples")
"""What runs count: language models the one, recommenders the other."""
ENDS = ("end", "left", "stopped")
"""Of all its steps; as it was asked to; with a fault that is told."""


@dataclass
class History:
    """Figures by step, and events in their order."""

    figures: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """Step → its figures, those of an evaluation after it among them."""
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def add(self, line: dict[str, Any]) -> None:
        """Take one line of the file; what is no number is no figure."""
        event = line.get("event")
        if event is not None:
            self.events.append(line)
        step = line.get("step" if event is None else "at")
        if isinstance(step, int) and event in (None, "evaluation"):
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
            numbers.pop("step" if event is None else "at")
            self.figures.setdefault(step, {}).update(numbers)

    @property
    def step(self) -> int:
        """The last with figures, or the one at which the run last began."""
        begun = (event["at"] for event in self.of("start") if isinstance(event.get("at"), int))
        return max([0, *self.figures, *begun])

    @property
    def steps(self) -> int | None:
        """How many the run has in all; None where it does not say."""
        told = [event["steps"] for event in self.of("start") if isinstance(event.get("steps"), int)]
        return told[-1] if told else None

    @property
    def end(self) -> dict[str, Any] | None:
        """The event with which the last attempt ended; None while it is at work, or killed."""
        last = [event for event in self.events if event.get("event") in ("start", *ENDS)]
        return last[-1] if last and last[-1]["event"] != "start" else None

    def of(self, name: str) -> list[dict[str, Any]]:
        """The events of a name."""
        return [event for event in self.events if event.get("event") == name]

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, figure) of all steps that have it."""
        return [(step, found[name]) for step, found in sorted(self.figures.items()) if name in found]

    def latest(self) -> dict[str, float]:
        """Each figure's last value."""
        found: dict[str, float] = {}
        for _, figures in sorted(self.figures.items()):
            found |= figures
        return found


class Tail:
    """Reads a run folder's figures as they come."""

    def __init__(self, folder: Path) -> None:
        """Raises `RunError` where no run has written any."""
        self._path, self._file, self._read = folder / FILE, -1, 0
        if not self._path.is_file():
            raise RunError(
                f"there are no figures of a run in {folder}",
                found=f"no {FILE}",
                next="name the folder that the run file calls `out`; it is written once training has begun",
            )
        self.history = History()

    def read(self) -> bool:
        """Take what is new; whether there was anything. A restart writes the file anew, without what comes again."""
        with self._path.open("rb") as file:
            identity = _identity(file.fileno())
            if identity != self._file:
                self._file, self._read, self.history = identity, 0, History()
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        for text in whole.splitlines():
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):  # the last line of a process that was killed
                continue
            if isinstance(line, dict):
                self.history.add(line)
        return bool(whole)


def read_history(folder: Path) -> History:
    """All that a run has told; raises `RunError` where it is none."""
    tail = Tail(folder)
    tail.read()
    return tail.history


def _identity(handle: int) -> int:
    """Of an open file, however it is called."""
    return os.fstat(handle).st_ino
