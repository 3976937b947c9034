"""The history of a run: figures and events of its metrics.jsonl, read while it may still be written (no torch)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.observe.metrics import FILE

COUNTED = ("tokens", "samples")
"""The units that runs count in: language models the first, all other kinds the second."""
ENDS = ("end", "left", "stopped")
"""Events of an attempt's end: all steps are made; a signal asked it to leave; a reported fault."""


@dataclass
class History:
    """Figures by step, and events in their order."""

    figures: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """Step → its figures, those of an evaluation after it among them."""
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def add(self, line: dict[str, Any]) -> None:
        """Take one line of the file; only numbers become figures."""
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
        """Return the last step with figures, or the one at which the run last began."""
        begun = (event["at"] for event in self.of("start") if isinstance(event.get("at"), int))
        return max([0, *self.figures, *begun])

    @property
    def steps(self) -> int | None:
        """Return how many steps the run has in all; None if it does not say."""
        told = [event["steps"] for event in self.of("start") if isinstance(event.get("steps"), int)]
        return told[-1] if told else None

    @property
    def start(self) -> dict[str, Any]:
        """Return the facts with which the last attempt began."""
        return self.of("start")[-1] if self.of("start") else {}

    @property
    def run(self) -> dict[str, Any]:
        """Return the run file's values; empty if the last attempt does not say."""
        run = self.start.get("run")
        return run if isinstance(run, dict) else {}

    @property
    def remaining(self) -> float | None:
        """Return seconds until the last step at the last speed; evaluations and checkpoints come on top."""
        latest = self.latest()
        for unit in COUNTED:
            speed, seen = latest.get(f"{unit}_per_s"), latest.get(unit)
            if self.steps and speed and seen and self.step and self.end is None:
                return (self.steps - self.step) * seen / self.step / speed
        return None

    @property
    def end(self) -> dict[str, Any] | None:
        """Return the event with which the last attempt ended; None while it is at work, or if it was killed."""
        last = [event for event in self.events if event.get("event") in ("start", *ENDS)]
        return last[-1] if last and last[-1]["event"] != "start" else None

    def of(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a name."""
        return [event for event in self.events if event.get("event") == name]

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, figure) of all steps that have the figure."""
        return [(step, found[name]) for step, found in sorted(self.figures.items()) if name in found]

    def latest(self) -> dict[str, float]:
        """Return the last value of each figure."""
        found: dict[str, float] = {}
        for _, figures in sorted(self.figures.items()):
            found |= figures
        return found


class Tail:
    """A reader of a run folder's figures, as they are written."""

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
        """Take new lines; return True if there were any. A restart writes the file anew, without repeated steps."""
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
    """Read the whole history of a run. Raises `RunError` if the folder holds none."""
    tail = Tail(folder)
    tail.read()
    return tail.history


def _identity(handle: int) -> int:
    """Return the inode of an open file: a renamed file keeps it."""
    return os.fstat(handle).st_ino
