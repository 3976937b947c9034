# pyright: basic
"""Our end of a trial: gets it a process of its own, talks to it, and outlives whatever happens to it."""

from __future__ import annotations

import contextlib
import math
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torchwright.core import system
from torchwright.core.cpu_load import Load
from torchwright.core.errors import abbreviated
from torchwright.core.process import interrupts
from torchwright.core.records import CaseTime, Measurement, Quality, Step
from torchwright.optimization.engines.base import engines
from torchwright.optimization.trial.fork_server import Forked, ForkServer, start
from torchwright.optimization.trial.values import Prepared

CONVERSIONS = "conversions"
"""Folder of the scratch in which trials leave for others what they made of the model."""
HANG_SECONDS = 600.0
"""A request that a quiet machine does not answer by then hangs: loading weights from a slow disk takes minutes."""


class TrialFailed(Exception):
    """A trial that crashed, hung, ran out of memory or raised: the reason, in words."""

    def __init__(self, reason: str, *, details: str = "", timed_out: bool = False) -> None:
        reason = abbreviated(reason)
        super().__init__(reason)
        self.reason, self.details, self.timed_out = reason, details, timed_out


def _not_done(seconds: float, *, hangs: bool = False) -> TrialFailed:
    why = "it hangs" if hangs else "the time that was left"
    return TrialFailed(f"not done after {seconds:.0f} s, {why}", timed_out=True)


@dataclass(kw_only=True)
class Context:
    """The context that all trials of one search share."""

    workload: Path
    """The folder into which `travel.pack` has written the workload."""
    device: str
    threads: int
    seed: int
    scratch: Path
    deadline: float
    """time.monotonic() at which whatever runs is stopped, unless it is essential."""
    patience: float = math.inf
    """Seconds after which what was compiled, and is not loaded and warm, is given up: it has no chance."""
    hang_seconds: float = HANG_SECONDS
    """Seconds of a quiet machine after which a request to an essential process is taken for a hang."""
    clock: Callable[[], float] = field(default=time.monotonic)
    load: Callable[[], Load] = Load.now
    sampled_load: Callable[[], Load] = Load.sampled
    any_threads: bool = False
    """Compile for as many threads as a process has at the call: `threads` are those of a disturbed machine."""
    fork: bool = False
    """True if trials are forked from a server that has imported torch and unpacked the workload once."""
    processes: list[TrialProcess] = field(default_factory=list)
    """Processes that were started and not closed: none outlives the block, even if its owner lost it."""
    _server: ForkServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in list(self.processes):
            process.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def server(self) -> ForkServer:
        """The server that trials are forked from; started when the first asks for it, and again if it has ended."""
        if self._server is not None and self._server.ended:
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = ForkServer(self.workload, self.scratch)
        return self._server

    def warm_up(self) -> None:
        """Wait until the server can fork, so that its imports are not in the time of the first trial.

        Raises `TrialFailed` where it cannot.
        """
        if self.fork:
            TrialProcess(self, essential=True).close()

    def remaining(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline - self.clock())

    def allowed(self, *, essential: bool) -> float:
        """Seconds that a request may take; an essential one is stopped only where it hangs.

        That limit grows with the load: sharing cores is not hanging.
        """
        if not essential:
            return self.remaining()
        return max(self.remaining(), self.hang_seconds * self.load().slowdown)


class TrialProcess:
    """A worker process. `ask` sends one request and waits for its answer, or for the time limit.

    With an `environment` the process is started from nothing, also where the context's others are forked. Native code
    has its temporary files in `folder`, or among the context's. `essential` marks a process without which the search
    has no result, such as the original's: the deadline does not end it, only a hang does.
    """

    def __init__(
        self,
        context: Context,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
        *,
        essential: bool = False,
    ) -> None:
        self._context = context
        self.essential = essential
        self._ended = ""
        self._log = tempfile.TemporaryFile(dir=context.scratch)  # noqa: SIM115
        ours, theirs = socket.socketpair()
        workload: dict[str, Any] = {}
        try:
            if context.fork and not environment:
                self._process = self._forked(theirs)
            else:
                self._process = start("torchwright.optimization.trial.worker", theirs, self._log, environment)
                workload = {"workload": str(context.workload), "path": sys.path}
            self._connection = system.connection(ours)
        except BaseException:
            self._log.close()
            raise
        finally:
            ours.close()
            theirs.close()
        context.processes.append(self)
        try:
            self.ask(
                "init",
                device=context.device,
                threads=context.threads,
                any_threads=context.any_threads,
                seed=context.seed,
                scratch=str(folder or context.scratch),
                **workload,
            )
        except BaseException:
            self.close()
            raise

    def _forked(self, theirs: socket.socket) -> Forked:
        allowed = self._context.allowed(essential=self.essential)
        try:
            slowdown = self._context.load().slowdown
            return self._context.server().fork(theirs, self._log, allowed, slowdown=slowdown)
        except TimeoutError as error:
            raise _not_done(allowed, hangs=self.essential) from error
        except (EOFError, ConnectionError) as error:
            raise TrialFailed("the process that trials are forked from has ended") from error

    def ask(self, method: str, **arguments: Any) -> Any:
        """Return the worker's answer.

        Raises `TrialFailed` if the worker crashes, raises or exceeds the context's time limit. The worker's own
        `TorchwrightError` is raised again, and so is its `OSError` for a full disk.
        """
        interrupts.check()
        if self._ended:
            raise TrialFailed(self._ended)
        waited, allowed = 0.0, self._context.allowed(essential=self.essential)
        try:
            self._connection.send_bytes(pickle.dumps((method, arguments)))
            while not interrupts.answered(self._connection, allowed - waited):
                # The load may have grown since, and with it what an essential request may take.
                waited, allowed = allowed, self._context.allowed(essential=self.essential)
                if not self.essential or allowed <= waited:
                    self.close("stopped: it was not done in time")
                    raise _not_done(waited, hangs=self.essential)
            kind, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            reason, tail = self._death(), self._tail()
            self.close(reason)
            raise TrialFailed(reason, details=tail) from error
        if kind == "refused":
            raise value
        if kind == "failed":
            name, line, trace = value
            raise TrialFailed(f"{name}: {line}" if line else name, details=trace)
        return value

    def close(self, reason: str = "closed already") -> None:
        """End the process and everything it started; later requests fail for `reason`."""
        if self._ended:
            return
        self._ended = reason
        system.kill_all(self._process)
        self._process.wait()
        self._connection.close()
        self._log.close()
        self._context.processes.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _death(self) -> str:
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "hung up and did not end"
        if code == system.KILLED:
            return "killed (signal 9): most likely out of memory"
        if code < 0:
            return f"crashed ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"

    def _tail(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            self._log.seek(0)
            return self._log.read()[-4000:].decode(errors="replace")
        return ""


@dataclass(kw_only=True)
class Candidate:
    """A prepared trial: a live process that can be timed in turn with others."""

    steps: tuple[Step, ...]
    process: TrialProcess
    folder: Path | None
    """The folder of the engine's compiled files, if it writes any."""
    prepared: Prepared
    how: str = ""
    """The way it runs, for a loaded artifact."""
    original: Candidate | None = None
    """The original in the same process, where it is there, too."""
    quality: Quality | None = None
    memory: int = 0
    faulting: float = 0.0
    """Seconds of a whole pass in which pages came from the kernel anew."""
    recompiles: int = 0
    turns: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def turn(self) -> dict[str, float]:
        """Time every case once more."""
        seconds = self.process.ask("time")
        self.turns.append(seconds)
        return seconds

    def measure_memory(self) -> None:
        """Measure peak memory and what fresh pages cost, and count recompilations so far."""
        memory = self.process.ask("memory")
        self.memory, self.recompiles = memory.peak, memory.recompiles
        self.faulting = self.seconds(memory.faulting)

    def close(self, *, keep: bool = False) -> None:
        """End the process; remove what it compiled unless it is to be kept."""
        self.process.close()
        if self.folder and not keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def seconds(self, turn: dict[str, float]) -> float:
        """Return the seconds of a whole pass from those of its calls: the objective."""
        return sum(turn[name] * repeat for name, repeat in self.prepared.repeats.items())

    def component_seconds(self) -> dict[str, float]:
        """A pass's seconds by component of the model, from medians over the turns; empty where it is one."""
        found: dict[str, float] = {}
        for case in self.measurement().cases if self.turns and self.prepared.parts else ():
            part = self.prepared.parts.get(case.name, case.name)
            found[part] = found.get(part, 0.0) + case.seconds * case.repeat
        return found

    def measurement(self) -> Measurement:
        """Medians over the turns so far."""
        import statistics

        cases = tuple(
            CaseTime(name=name, seconds=statistics.median(row[name] for row in self.turns), repeat=repeat)
            for name, repeat in self.prepared.repeats.items()
        )
        return Measurement(
            seconds=sum(case.seconds * case.repeat for case in cases),
            cases=cases,
            peak_memory_bytes=self.memory,
            weight_bytes=self.prepared.weight_bytes,
            prepare_seconds=self.prepared.seconds,
            quality=self.quality,
            recompiles=self.recompiles,
        )


def environment_of(steps: Sequence[Step]) -> dict[str, str]:
    """Return the environment variables that a process with these steps needs at its start."""
    from torchwright.optimization.techniques.base import from_step

    environment: dict[str, str] = {}
    for step in steps:
        environment |= from_step(step).environment()
    return environment


@contextlib.contextmanager
def _patience(context: Context) -> Iterator[None]:
    """Within the block the deadline is the context's patience, where that ends earlier; a busy machine has more."""
    deadline, seconds = context.deadline, context.patience * context.load().slowdown
    context.deadline = min(deadline, context.clock() + seconds)
    try:
        yield
    except TrialFailed as failure:
        if not failure.timed_out or context.deadline == deadline:
            raise
        reason = f"not loaded and warm after {seconds:.0f} s: its calls take far longer than the original's"
        raise TrialFailed(reason) from failure
    finally:
        context.deadline = deadline


def judge(
    process: TrialProcess,
    max_drop: float,
    *,
    reference: Any,
    further: Callable[[], Any],
    unseen: bool,
    show: bool = False,
) -> Quality:
    """Return the metric of what a process runs, on more of the data where the sample leaves the budget open.

    `reference` and `further` are the original's observations, the latter asked for when they are needed: None for
    want of data or time. With `show` the process keeps what `pictures` then gives.
    """
    quality: Quality = process.ask("compare", reference=reference, unseen=unseen, show=show)
    if not quality.is_open(max_drop) or (more := further()) is None:
        return quality
    return process.ask("compare", reference=more, unseen=unseen, further=True, show=show)


def start_candidate(
    context: Context,
    steps: tuple[Step, ...],
    environment: dict[str, str] | None = None,
    *,
    essential: bool = False,
) -> Candidate:
    """Prepare `steps` in a process of their own; what an engine compiles into files is loaded in another.

    `environment` is set for both, in addition to the steps' own. `essential` is for the original: see `TrialProcess`.

    Raises `TrialFailed` or the `TorchwrightError` with which a technique refused.
    """
    environment = environment_of(steps) | (environment or {})
    folder = Path(tempfile.mkdtemp(dir=context.scratch))
    process = TrialProcess(context, environment, essential=essential)
    try:
        prepared: Prepared = process.ask(
            "prepare", steps=steps, folder=str(folder), conversions=str(context.scratch / CONVERSIONS)
        )
        apart = engines.get(prepared.engine).apart
        if apart:
            process.close()
            # Packages are unpacked in `folder`, too.
            process = TrialProcess(context, environment, folder, essential=essential)
            with _patience(context):
                process.ask("load", steps=steps, folder=str(folder), prepared=prepared)
        else:
            folder.rmdir()
    except BaseException:
        process.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Candidate(
        steps=steps,
        process=process,
        folder=folder if apart else None,
        prepared=prepared,
    )
