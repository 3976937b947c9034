"""Our end of the worker processes of one machine: each is pinned to cores of its own and given a part at a time."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from torchwright.core import system
from torchwright.core.cpu_load import affinity
from torchwright.core.errors import WorkloadError
from torchwright.core.process.waited import how_it_ended
from torchwright.map.compute import Computed, OutputForm
from torchwright.map.isolation import Isolation, WorkerDied
from torchwright.map.plan import Part
from torchwright.map.tasks.base import TaskSpec

DEATHS = 2
"""Workers in a row that died before they were ready: it is the model, and not the machine."""
WORKER = (sys.executable, "-m", "torchwright.map.worker")
"""The beginning of a worker's command."""
LOG_BYTES = 4000
"""The end of a dead worker's output that an error repeats."""


class Executor(Protocol):
    """The interface of what computes parts: `Pool` on this machine, `Cluster` on Ray."""

    notices: list[str]

    def free(self) -> int:
        """Return how many parts may be submitted now."""
        ...

    def submit(self, part: Part) -> None:
        """Begin to compute a part."""
        ...

    def running(self) -> int:
        """Return how many parts are not done."""
        ...

    def finished(self, seconds: float) -> list[tuple[Part, Computed]]:
        """Wait so long for parts that are done."""
        ...

    def close(self) -> None:
        """End what computes, whatever it does."""
        ...


class _Worker:
    """One process and the part that it computes."""

    def __init__(self, command: Sequence[str], cores: Sequence[int], threads: int, first: bytes) -> None:
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [
                *command,
                *(str(theirs.fileno()), str(os.getpid()), ",".join(map(str, cores))),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            **system.handing([theirs]),
            **system.apart(),
        )
        theirs.close()
        self.connection: Connection = system.connection(ours)
        ours.close()
        self.ready = False
        self.part: Part | None = None
        self.since = 0.0
        """When it was given the part, by the monotonic clock."""
        self.connection.send_bytes(first)

    def log(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - LOG_BYTES))
        return self._log.read().decode("utf-8", "replace").strip()

    def close(self) -> None:
        system.kill_all(self.process)
        self.process.wait()
        self.connection.close()
        self._log.close()


class Pool:
    """`workers` processes with `threads` threads each; a worker that dies is replaced, and its part computed again."""

    def __init__(
        self,
        spec: TaskSpec,
        form: OutputForm,
        *,
        workers: int,
        threads: int,
        part_seconds: float | None = None,
        command: Sequence[str] = WORKER,
    ) -> None:
        """A worker that takes longer than `part_seconds` for a part is killed; `command` starts one."""
        self._isolation, self._part_seconds = Isolation(form), part_seconds
        self.notices = self._isolation.notices
        self._command, self._threads = command, threads
        self._first = pickle.dumps((spec, form, threads))
        cores = affinity()
        # One worker may use every core: the system moves its threads better than a fixed place would.
        self._cores = [
            cores[place * threads : (place + 1) * threads] if workers > 1 else [] for place in range(workers)
        ]
        self._workers = list[_Worker]()
        self._waiting = list[Part]()
        self._early = 0
        try:
            for own in self._cores:
                self._workers.append(_Worker(command, own, threads, self._first))
        except BaseException:
            self.close()
            raise

    def free(self) -> int:
        return sum(worker.part is None for worker in self._workers) - len(self._waiting)

    def submit(self, part: Part) -> None:
        self._waiting.append(part)
        self._assign()

    def running(self) -> int:
        return len(self._waiting) + sum(worker.part is not None for worker in self._workers)

    def finished(self, seconds: float) -> list[tuple[Part, Computed]]:
        """Raises `WorkerDied` where workers die again and again, and what a worker raises."""
        found = list[tuple[Part, Computed]]()
        self._kill_slow()
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), seconds):
            worker = by_connection[connection]  # pyright: ignore[reportArgumentType]
            try:
                kind, value = pickle.loads(worker.connection.recv_bytes())
            except (EOFError, OSError):
                found += self._replace(worker)
                continue
            if kind == "computed":
                assert worker.part is not None
                found += self._isolation.done(worker.part, value)
                worker.part = None
            elif kind == "ready":
                worker.ready, self._early = True, 0
                self.notices += [text for text in value if text not in self.notices]
            else:
                raise self._fault(kind, value)
        self._assign()
        return found

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _assign(self) -> None:
        for worker in self._workers:
            if self._waiting and worker.ready and worker.part is None:
                worker.part, worker.since = self._waiting.pop(0), time.monotonic()
                with contextlib.suppress(OSError):  # it has died, and the next `finished` replaces it
                    worker.connection.send_bytes(pickle.dumps(worker.part))

    def _kill_slow(self) -> None:
        """Kill the workers whose part takes too long."""
        for worker in self._workers:
            if worker.part is not None and self._is_slow(worker):
                system.kill_all(worker.process)

    def _is_slow(self, worker: _Worker) -> bool:
        return self._part_seconds is not None and time.monotonic() - worker.since > self._part_seconds

    def _replace(self, worker: _Worker) -> list[tuple[Part, Computed]]:
        """Start another worker in the place of one that died, and give its part to whoever is free.

        Returns a part that is done without the row that ended the worker.
        """
        code, log, part = worker.process.wait(), worker.log(), worker.part
        slow = part is not None and self._is_slow(worker)
        place = self._workers.index(worker)
        worker.close()
        cause = (
            f"it took longer than {self._part_seconds:g} s" if slow else f"its worker died: {_cause(code)}"
        )
        if part is None:
            self._early += 1
            if self._early >= DEATHS:
                raise WorkerDied(
                    f"a worker died {self._early} times before it was ready",
                    found=_cause(code) + (f"; it said: {log[-500:]}" if log else ""),
                    next="fewer --workers, if memory ran out; what is done is kept",
                )
        self._workers[place] = _Worker(self._command, self._cores[place], self._threads, self._first)
        if part is None:
            return []
        again, found = self._isolation.failed(part, cause, retry=not slow)
        self._waiting[:0] = again
        return found

    def _fault(self, kind: str, value: Any) -> Exception:
        if kind == "refused":
            return value
        text, trace = value
        return RuntimeError(f"a worker failed: {text}\n{trace}")


def default_workers(threads: int | None, cores: int | None = None) -> tuple[int, int]:
    """Return (workers, threads of each): as many as the artifact's threads leave room for, or one with all cores."""
    cores = cores or len(affinity())
    if threads is None:
        return 1, cores
    return max(1, cores // threads), min(threads, cores)


def shared_out(
    workers: int | None, threads: int | None, measured: int | None, cores: int | None = None
) -> tuple[int, int]:
    """Return (workers, threads of each) of what was asked; `cores` are by default those of this process.

    Raises `WorkloadError` for more threads than cores.
    """
    cores = cores or len(affinity())
    if workers is None and threads is None:
        return default_workers(measured, cores)
    each = threads or max(1, cores // (workers or 1))
    count = workers or max(1, cores // each)
    if count * each > cores:
        raise WorkloadError(
            f"{count} workers with {each} threads each",
            found=f"{cores} cores",
            next="fewer --workers or --threads: more of them than cores wait for each other",
        )
    return count, each


def _cause(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed by the system: most likely out of memory"
    return how_it_ended(code)
