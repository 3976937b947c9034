"""Prefetching of compilations: on a free core, the next candidate is compiled concurrently with the current one.

Compiling is one thread's work, and most of a trial that compiles. A guess that was wrong costs nobody anything: its
process has what others leave of the cores, and stands still whenever something is timed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchwright.core.cpu_load import usable_cores
from torchwright.core.errors import TorchwrightError
from torchwright.core.records import Step
from torchwright.hardware.devices.cpu import available_memory_bytes
from torchwright.optimization.engines.conversion import shorten
from torchwright.optimization.techniques.base import compiles, conversion_of, from_step
from torchwright.optimization.trial import client as trial
from torchwright.optimization.trial.client import CONVERSIONS, Context, TrialFailed, TrialProcess
from torchwright.optimization.trial.values import Prepared

SPARE = 2 * 2**30
"""Bytes of memory that compiling takes in addition to the model's."""
COPIES = 6
"""So many times a model's weights it takes at most: rounded, folded, as text of a program and in its package."""


@dataclass(kw_only=True)
class _Compilation:
    process: TrialProcess
    folder: Path
    begun: float
    stopped: float
    """When it was stopped last."""
    paused: float = 0.0
    """Seconds for which it stood still before."""


class CompilePrefetcher:
    """The compilations prefetched in one search; paused except within `beside`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kept = context.scratch / CONVERSIONS
        self._running: dict[str, _Compilation] = {}
        self._took: dict[str, float] = {}

    @property
    def able(self) -> bool:
        """Check whether a second core is free during a compilation, and a process for it can be started."""
        return self._context.fork and self._context.device == "cpu" and usable_cores() > 1

    def begin(self, steps: tuple[Step, ...], now: tuple[Step, ...], weight_bytes: int) -> None:
        """Compile `steps`, which may be tried after those that are tried `now`; what else was begun is given up.

        Without any it is only given up.
        """
        name, current = conversion_of(steps), conversion_of(now)
        for other in self._running.keys() - {name, current}:
            self._give_up(other)
        if name in (None, current) or not self._worth(name, steps, now, weight_bytes):
            return
        try:
            process = TrialProcess(self._context)
        except TrialFailed:
            return
        folder, clock = Path(tempfile.mkdtemp(dir=self._context.scratch)), self._context.clock()
        self._running[name] = _Compilation(process=process, folder=folder, begun=clock, stopped=clock)
        process.give_way()
        process.request("prepare", steps=steps, folder=str(folder), conversions=str(self._kept))
        process.stop()

    def _worth(self, name: str, steps: tuple[Step, ...], now: tuple[Step, ...], weight_bytes: int) -> bool:
        return (
            self.able
            and _compiles_on_one_thread(steps)
            and _compiles_on_one_thread(now)
            and not trial.environment_of(steps)
            and name not in self._running
            and not (self._kept / name).exists()
            and available_memory_bytes() > SPARE + COPIES * weight_bytes
        )

    @contextmanager
    def beside(self, steps: tuple[Step, ...]) -> Generator[None]:
        """Compile `steps` around a block, or wait for their prefetched compilation and take it over.

        Raises `TrialFailed` where that is not done by the context's deadline.
        """
        for compilation in self._running.values():
            compilation.paused += self._context.clock() - compilation.stopped
            compilation.process.go_on()
        try:
            name = conversion_of(steps)
            if name in self._running:
                self._take(name)
            yield
        finally:
            for name, compilation in list(self._running.items()):
                if compilation.process.has_answered():
                    self._take(name)
                else:
                    compilation.stopped = self._context.clock()
                    compilation.process.stop()

    def seconds(self, steps: Sequence[Step]) -> float:
        """Return the seconds that a trial of these steps saves by now."""
        name = conversion_of(steps) or ""
        compilation = self._running.get(name)
        if compilation is None:
            return self._took.get(name, 0.0)
        return compilation.stopped - compilation.begun - compilation.paused

    def is_done(self, steps: Sequence[Step]) -> bool:
        """Check whether everything that a trial of these steps compiles is prefetched."""
        return conversion_of(steps) in self._took

    def close(self) -> None:
        """Give up all that is not done."""
        for name in list(self._running):
            self._give_up(name)

    def _take(self, name: str) -> None:
        """Wait for the package, for the trial that wants it; without a package that trial reports the reason."""
        compilation = self._running[name]
        try:
            prepared: Prepared = compilation.process.answer()
        except TrialFailed as failure:
            if failure.timed_out:
                raise
        except (TorchwrightError, OSError):
            return
        else:
            self._took[name] = prepared.converted - compilation.paused
            shorten(self._kept / name, compilation.paused)
        finally:
            self._give_up(name)

    def _give_up(self, name: str) -> None:
        compilation = self._running.pop(name)
        compilation.process.close()
        shutil.rmtree(compilation.folder, ignore_errors=True)


def _compiles_on_one_thread(steps: tuple[Step, ...]) -> bool:
    return compiles(steps) and not any(from_step(step).times_kernels for step in steps)
