"""Takes the scorecard: child processes with limits of time and memory, a new one after each that ends too early."""

from __future__ import annotations

import json
import os
import platform
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchwright.core import system
from torchwright.core.errors import TorchwrightError
from torchwright.hardware.operators.records import Fault, Scorecard

START_SECONDS = 300.0
"""For a child to import PyTorch's test databases and reach the device: 10 s on a quiet core, a driver may take more."""


ENDED = {"op_db": "forward", "module_db": "modules", "optim_db": "optimizers"}
"""Database → the family of a sample that ended its child, which could not say it any more."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a child process."""

    seconds: float = 60.0
    """For all samples of one entry."""
    memory_bytes: int = 8 << 30
    """Private writable memory of the process; a device's own memory is not counted."""


def take(
    device: str,
    limits: Limits | None = None,
    *,
    match: str | None = None,
    tell: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Scorecard:
    """Hold a device against the CPU; `match` is a regular expression that the names of entries must contain.

    Whatever a device does to the process that uses it, the scorecard names the entry and goes on with the next.
    Raises `TorchwrightError` if no child gets as far as the first entry, and for a pattern that fits no entry.
    """
    limits = limits or Limits()
    begun = time.monotonic()
    entries = _entries(limits)
    wanted = [index for index, (_, name) in enumerate(entries) if re.search(match or "", name)]
    if not wanted:
        raise TorchwrightError("no operator, layer or optimizer has such a name", found=f"--match {match}")
    card = Scorecard(device=device, torch=str(torch.__version__), machine=platform.platform())
    left = list(wanted)
    while left:
        reached = False
        for line in _Child(device, left, limits).lines():
            reached = True
            if "begin" in line:
                tell(len(wanted) - len(left), len(wanted), entries[line["begin"]][1])
                continue
            left.remove(line["end"])
            _add(card, entries[line["end"]], line)
        if not reached:
            raise TorchwrightError(
                f"a process that uses the device '{device}' cannot be started",
                next=f"`torchwright doctor --device {device}` says more",
            )
    card.seconds = time.monotonic() - begun
    return card


def _entries(limits: Limits) -> list[tuple[str, str]]:
    for line in _Child("cpu", None, limits).lines():
        return [(database, name) for database, name in line["entries"]]
    raise TorchwrightError(
        "PyTorch's test databases cannot be imported",
        found=f"torch {torch.__version__}",
        next="python -c 'import torch.testing._internal.common_methods_invocations'",
    )


def _add(card: Scorecard, entry: tuple[str, str], line: dict[str, Any]) -> None:
    database, name = entry
    if "ended" in line:
        outcome, family = line["ended"], ENDED[database]
        card.add(family, outcome, 1)
        card.faults.append(
            Fault(entry=name, family=family, outcome=outcome, samples=1, message=line["message"])
        )
        card.entries += 1
        return
    for family, outcomes in line["counts"].items():
        for outcome, samples in outcomes.items():
            card.add(family, outcome, samples)
    card.faults.extend(Fault(entry=name, **fault) for fault in line["faults"])
    if line["left_out"]:
        card.left_out[f"{database}: {name}"] = line["left_out"]
    else:
        card.entries += 1


class _Child:
    """A child process with its job."""

    def __init__(self, device: str, entries: list[int] | None, limits: Limits) -> None:
        self.limits, self.entries = limits, entries
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "torchwright.hardware.operators.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            **system.apart(),
        )
        job = {"device": device, "entries": entries, "memory_bytes": limits.memory_bytes}
        assert self._process.stdin is not None
        with self._process.stdin:
            self._process.stdin.write(json.dumps(job))

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield what the child says; for an entry that it did not survive, the outcome."""
        current: int | None = None
        try:
            for line in self._said():
                if line is None:
                    yield from self._ended(current, "hung", f"no answer after {self.limits.seconds:.0f} s")
                    return
                found = json.loads(line)
                current = found.get("begin")
                yield found
            yield from self._ended(current, "crashed", self._reason())
        finally:
            system.kill_all(self._process)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _said(self) -> Iterator[str | None]:
        """Yield lines, and None where the child was silent for longer than it may be."""
        assert self._process.stdout is not None
        descriptor, buffered, limit = self._process.stdout.fileno(), b"", START_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while True:
                if not selector.select(limit):
                    yield None
                    return
                read = os.read(descriptor, 1 << 16)
                if not read:
                    return
                *lines, buffered = (buffered + read).split(b"\n")
                for line in lines:
                    yield line.decode()
                limit = self.limits.seconds

    def _reason(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"the process that used the device ended by {signal.Signals(-code).name}"
        return f"the process that used the device ended with exit code {code}"

    def _ended(self, entry: int | None, outcome: str, message: str) -> Iterator[dict[str, Any]]:
        """Yield the outcome of the entry that the child was at; none if it was at its end."""
        if entry is not None:
            yield {"end": entry, "ended": outcome, "message": message}
