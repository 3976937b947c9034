"""The writing side: one process's time, phase by phase, in an append-only file that survives the process.

The account is a state machine: at each change of phase the time since the last change goes to the phase that ends. It
counts whole nanoseconds of the monotonic clock, so that the buckets' sum is the time that passed and nothing else. A
line holds what was counted since the line before it; a thread of its own ends one every few seconds, whatever the
program is doing. A step that ends writes the line that has begun once more in its place. So a kill loses the step in
which it came and no other, and a file does not grow by its steps.

    {"ledger": 1, "rank": 0, "world": 4, "wall": 1762000000123456789, "every": 2000000000, "host": "n7", …}
    {"t": 3100000000, "s": {"start": 3100000000}}
    {"t": 5100000000, "s": {"data_wait": 40000000, "step": 1960000000}, "step": 12}
    {"t": 5100000000, "s": {}, "checkpoint": 12}
    {"t": 6000000000, "s": {"idle": 900000000}, "end": true}

`t` is nanoseconds since `wall`, the wall clock when the account begins; `step` the last step completed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from torchwright.core.errors import unknown
from torchwright.train.ledger.buckets import BUCKETS, FOLDER, FORMAT, NANO
from torchwright.train.ledger.launcher import Launcher

_LOG = logging.getLogger(__name__)
_FREQUENT = frozenset({"step", "data_wait"})
"""Phases that alternate too often for a line each."""
CLOCKS_DIFFER = NANO
"""Clocks of hosts that work together differ by less (NTP keeps them within milliseconds)."""


class Clock(Protocol):
    """Two clocks, in nanoseconds; the module `time` is one."""

    def monotonic_ns(self) -> int: ...
    def time_ns(self) -> int: ...


class Ledger:
    """Writes where one process's time goes.

        with Ledger(run_dir, rank=rank, world=world, started=process_started()) as ledger:
            with ledger.phase("start"):
                ...
                ledger.resumed(step=120)              # only where a checkpoint was loaded
            while training:
                with ledger.phase("data_wait"):
                    ...
                with ledger.phase("step"):
                    ...
            with ledger.phase("checkpoint"):
                ...
            ledger.checkpointed(step=140)             # once it is whole on the disk; from any thread
            ledger.compiled(found=6, made=0)          # graphs and files, after a phase `compile`

    Phases may be nested: the time goes to the innermost. Before the first phase time counts as `start`, later as
    `idle` where no phase is open. Leaving the `with` block by an exception, or not at all, marks the attempt as dead.
    A disk that is full costs no training: the account is kept and written when there is room again.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        rank: int = 0,
        world: int = 1,
        launch: str | None = None,
        started: float | None = None,
        launcher: Launcher | None = None,
        write_every: float = 2.0,
        clock: Clock = time,
    ) -> None:
        """Open a file of its own for this process in `run_dir`.

        `launch`: what all processes of this start of the job share, and no other start does; by default taken
        from torchrun. `started`: the wall clock (seconds since 1970) at which the account begins, by default now;
        the time from then to now counts as `start`. `launcher`: what starts the processes again, so that the time of
        those that died before they had a ledger is the next one's. `write_every`: seconds between lines, the most that
        a kill loses. `clock`: the time of both kinds.
        """
        self._clock = clock
        now, today = clock.monotonic_ns(), clock.time_ns()
        before = 0 if started is None else max(0, today - int(started * NANO))
        self._zero = self._changed = now - before
        self._spent: dict[str, int] = {}
        self._phases: list[str] = []
        self._outside = "start"
        self._totals = dict.fromkeys(BUCKETS, 0)
        self._step, self._written_step = 0, 0
        self._lock = threading.RLock()
        self._owner = threading.get_ident()
        self._complained = False
        folder = Path(run_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        wall = _after_the_last(folder, today)
        self.path = folder / f"rank{rank:05d}-{wall}-{os.getpid()}.jsonl"
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        header = {
            "ledger": FORMAT,
            "rank": rank,
            "world": world,
            "wall": wall - before,
            "every": int(write_every * NANO),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "launch": _launch() if launch is None else launch,
            "launcher": launcher and asdict(launcher),
        }
        self._place = os.write(self._file, _encoded(header))
        self._stop = threading.Event()
        self._pulse = threading.Thread(
            target=self._beat, args=(write_every,), name="torchwright-ledger", daemon=True
        )
        self._pulse.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=kind is None)

    @contextmanager
    def phase(self, name: str, *, step: int | None = None) -> Generator[None]:
        """Count the time of the block as `name`, a key of `BUCKETS`.

        A block of the phase `step` that ends without an exception completes a step: number `step`, or one more
        than the last. Raises `UnknownName` for a phase that does not exist. Only the thread that made the ledger
        may change the phase.
        """
        if name not in BUCKETS:
            raise unknown("phase", name, BUCKETS)
        assert threading.get_ident() == self._owner, "a ledger's phases belong to the thread that made it"
        self._enter(name)
        completed: int | None = None
        try:
            yield
            if name == "step":
                completed = self._step + 1 if step is None else step
        finally:
            self._leave(name, completed)

    def resumed(self, step: int) -> None:
        """The program's state is now that after `step`: what earlier attempts did beyond it is lost."""
        with self._lock:
            self._write()
            self._step = self._written_step = step
            self._write(resume=step)

    def checkpointed(self, step: int) -> None:
        """A checkpoint of the state after `step` lies whole on the disk. Any thread may say so."""
        with self._lock:
            self._write(checkpoint=step)

    def compiled(self, *, found: int, made: int) -> None:
        """Record the graphs that the compiler found and made since the last call."""
        with self._lock:
            self._write(found=found, made=made)

    def seconds(self) -> dict[str, float]:
        """Seconds of this process in each bucket until now."""
        with self._lock:
            self._count()
            return {bucket: spent / NANO for bucket, spent in self._totals.items()}

    def effective(self) -> float:
        """The share of this process's time until now that was spent on steps, 0 to 1."""
        seconds = self.seconds()
        return seconds["step"] / max(sum(seconds.values()), 1e-9)

    def close(self, *, finished: bool = True) -> None:
        """End the account; `finished` is false where the attempt failed. Closing twice is once."""
        self._stop.set()
        self._pulse.join()
        with self._lock:
            if self._file < 0:
                return
            self._write(end=finished)
            os.close(self._file)
            self._file = -1

    def _enter(self, name: str) -> None:
        with self._lock:
            self._count()
            if name not in _FREQUENT:
                self._write()
            self._phases.append(name)
            self._outside = "idle"

    def _leave(self, name: str, completed: int | None) -> None:
        with self._lock:
            self._count()
            if name not in _FREQUENT:
                self._write()
            self._phases.pop()
            if completed is not None:
                self._step = completed
                self._write(whole=False)

    def _count(self) -> None:
        """Give the time since the last change to the phase that is open; a closed ledger's account stands still."""
        if self._file < 0:
            return
        now = self._clock.monotonic_ns()
        bucket = self._phases[-1] if self._phases else self._outside
        self._spent[bucket] = self._spent.get(bucket, 0) + now - self._changed
        self._totals[bucket] += now - self._changed
        self._changed = now

    def _write(self, *, whole: bool = True, **event: Any) -> None:
        """Write a line with what was counted since the last whole one; the next one takes its place unless it is whole.

        On a full disk, or where it was cut short, it is not whole.
        """
        self._count()
        line: dict[str, Any] = {"t": self._changed - self._zero, "s": self._spent}
        if self._step != self._written_step:
            line["step"] = self._step
        data = _encoded(line | event)
        try:
            written = os.pwrite(self._file, data, self._place)
        except OSError as error:
            self._complain(error)
            return
        if whole and written == len(data):
            self._place += written
            self._spent, self._written_step = {}, self._step

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            _LOG.warning(
                "the ledger %s cannot be written (%s); it is tried again with each line", self.path, error
            )

    def _beat(self, every: float) -> None:
        while not self._stop.wait(every):
            with self._lock:
                self._write()


def _after_the_last(folder: Path, clock: int) -> int:
    """Return `clock`, or a later time that follows the last attempt: a clock that was set back would put it first."""
    last = 0
    for path in folder.glob("rank*.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            last = max(last, path.stat().st_mtime_ns)
        with contextlib.suppress(ValueError, IndexError):  # two files may have one time of change
            last = max(last, int(path.stem.split("-")[1]))
    return last + 1 if last - clock > CLOCKS_DIFFER else clock


def _launch() -> str:
    """Return the name of this start of the job, if torchrun was given an id for the job; else an empty text."""
    if os.environ.get("TORCHELASTIC_RUN_ID", "none") == "none":  # its default, the same for every start
        return ""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(os.environ.get(name, "") for name in names)


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
