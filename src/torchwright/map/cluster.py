"""Parts as tasks of a Ray cluster: whichever node is free computes the next one.

A task is a pure function of the part, so Ray may run it again on another node when one dies. The model is opened once
in each of Ray's worker processes, which serve one task after another. The answers come back to the process that plans,
which writes them: the nodes need the model, and no common disk for the output.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any

from torchwright.core.errors import TorchwrightError, WorkloadError
from torchwright.core.process import interrupts
from torchwright.map.compute import Computed, OutputForm, compute
from torchwright.map.isolation import Isolation
from torchwright.map.plan import Part
from torchwright.map.tasks.base import Task, TaskSpec

RETRIES = 5
"""Times that a part is computed again whose node has died: as many as nodes that die under one part."""
STUCK = 75
"""The exit code of a worker that ends itself because a part takes too long."""
AHEAD = 2
"""Parts submitted for each place: one runs, the next has its rows on the way."""
_opened: dict[str, Task] = {}
"""The one task of this Ray worker, by its spec."""


class Cluster:
    """Parts on Ray, `threads` cores for each; places grow and shrink with the cluster."""

    def __init__(
        self,
        address: str,
        spec: TaskSpec,
        form: OutputForm,
        *,
        workers: int | None,
        threads: int,
        part_seconds: float | None = None,
    ) -> None:
        """A worker that takes longer than `part_seconds` for a part ends itself.

        Raises `WorkloadError` where Ray is not installed or no cluster answers.
        """
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise WorkloadError(
                "--ray needs Ray, which is not installed",
                found=str(error),
                next="pip install 'torchwright[ray]'",
            ) from error
        self._isolation, self._part_seconds = Isolation(form), part_seconds
        self.notices = self._isolation.notices
        self._nodes_lost = Counter[tuple[int, int]]()
        self._ray: Any = ray
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": _environment(threads)},
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise WorkloadError(
                f"no Ray cluster answers at {address}",
                found=str(error).partition("\n")[0],
                next="ray start --head, or --ray auto on a node of the cluster",
            ) from error
        self._remote: Any = ray.remote(num_cpus=threads, max_retries=0)(compute_part)
        self._shared = ray.put((spec, form, threads, part_seconds))
        self._running: dict[Any, Part] = {}
        self._asked, self._threads = workers, threads
        self._places = self._count()

    def free(self) -> int:
        return self._places * AHEAD - len(self._running)

    def submit(self, part: Part) -> None:
        self._running[self._remote.remote(self._shared, part)] = part

    def running(self) -> int:
        return len(self._running)

    def finished(self, seconds: float) -> list[tuple[Part, Computed]]:
        """Raises `TorchwrightError` as the task does, and where nodes or workers die again and again."""
        self._places = self._count()
        done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        found = list[tuple[Part, Computed]]()
        for reference in done:
            part = self._running.pop(reference)
            try:
                computed, notices = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                cause = getattr(error, "cause", None)
                raise cause if isinstance(cause, TorchwrightError) else error from None
            except (self._ray.exceptions.WorkerCrashedError, self._ray.exceptions.OutOfMemoryError) as error:
                found += self._crashed(part, error)
                continue
            except self._ray.exceptions.RayError as error:
                self._lost(part, error)
                continue
            found += self._isolation.done(part, computed)
            self.notices += [text for text in notices if text not in self.notices]
        return found

    def close(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()

    def _crashed(self, part: Part, error: Exception) -> list[tuple[Part, Computed]]:
        """Compute a part again whose worker died; return one that is done without the row that ended the worker."""
        cause = f"its worker died: {str(error).partition(chr(10))[0]}"
        if self._part_seconds is not None:
            cause = f"its worker died, or ended because it took longer than {self._part_seconds:g} s"
        again, found = self._isolation.failed(part, cause, retry=True)
        for piece in again:
            self.submit(piece)
        return found

    def _lost(self, part: Part, error: Exception) -> None:
        """Compute a part again whose node died; raise `TorchwrightError` where that happens again and again."""
        place = part.index, part.first_row
        self._nodes_lost[place] += 1
        if self._nodes_lost[place] > RETRIES:
            raise TorchwrightError(
                f"Ray gave up the part with row {part.first_row:,} of {part.source}",
                found=str(error).partition("\n")[0],
                next="run the same command again: what is done is kept",
            ) from error
        self.submit(part)

    def _count(self) -> int:
        """Return the parts that the cluster's living nodes can compute at the same time."""
        interrupts.check()
        cores = self._ray.cluster_resources().get("CPU", 0)
        places = max(1, int(cores // self._threads))
        return places if self._asked is None else min(places, self._asked)


def compute_part(
    shared: tuple[TaskSpec, OutputForm, int, float | None], part: Part
) -> tuple[Computed, list[str]]:
    """Compute one part in a worker of Ray, which keeps its task for the next."""
    import torch

    spec, form, threads, seconds = shared
    key = repr(spec)
    if key not in _opened:
        torch.set_num_threads(threads)
        from torchwright.map.tasks.registry import open_task

        _opened.clear()
        _opened[key] = open_task(spec)
    task = _opened[key]
    # What is stuck may hold no lock of Python's and never return to it: only the end of the process helps.
    watch = None if seconds is None else threading.Timer(seconds, os._exit, (STUCK,))
    if watch is not None:
        watch.daemon = True
        watch.start()
    try:
        return compute(task, part, form), list(task.notices)
    finally:
        if watch is not None:
            watch.cancel()


def _environment(threads: int) -> dict[str, str]:
    """Return the variables of this process that a task needs on its node as well."""
    names = ("PYTHONPATH", "TORCHWRIGHT_CACHE", "HF_HOME", "HF_HUB_OFFLINE")
    given = {name: os.environ[name] for name in names if name in os.environ}
    return given | {"OMP_NUM_THREADS": str(threads)}
