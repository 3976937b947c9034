"""Parts as tasks of a Ray cluster: whichever node is free computes the next one.

A task is a pure function of the part, so Ray may run it again on another node when one dies. The model is opened once
in each of Ray's worker processes, which serve one task after another. The answers come back to the process that plans,
which writes them: the nodes need the model, and no common disk for the output.
"""

from __future__ import annotations

import os
from typing import Any

from torchwright.core.errors import TorchwrightError, WorkloadError
from torchwright.core.process import interrupts
from torchwright.map.compute import Computed, OutputForm, compute
from torchwright.map.plan import Part
from torchwright.map.tasks.base import Task, TaskSpec

RETRIES = 5
"""Times that Ray computes a part again whose node or process has died, as many as nodes that die under one part."""
AHEAD = 2
"""Parts submitted for each place: one runs, the next has its rows on the way."""
_opened: dict[str, Task] = {}
"""The one task of this Ray worker, by its spec."""


class Cluster:
    """Parts on Ray, `threads` cores for each; places grow and shrink with the cluster."""

    def __init__(
        self, address: str, spec: TaskSpec, form: OutputForm, *, workers: int | None, threads: int
    ) -> None:
        """Raises `WorkloadError` where Ray is not installed or no cluster answers."""
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise WorkloadError(
                "--ray needs Ray, which is not installed",
                found=str(error),
                next="pip install 'torchwright[ray]'",
            ) from error
        self.notices = list[str]()
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
        self._remote: Any = ray.remote(num_cpus=threads, max_retries=RETRIES)(compute_part)
        self._shared = ray.put((spec, form, threads))
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
        """Raises `TorchwrightError` as the task does, and for a part whose nodes die again and again."""
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
            except self._ray.exceptions.RayError as error:
                raise TorchwrightError(
                    f"Ray gave up the part with row {part.first_row:,} of {part.source}",
                    found=str(error).partition("\n")[0],
                    next="run the same command again: what is done is kept",
                ) from error
            found.append((part, computed))
            self.notices += [text for text in notices if text not in self.notices]
        return found

    def close(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()

    def _count(self) -> int:
        """Return the parts that the cluster's living nodes can compute at the same time."""
        interrupts.check()
        cores = self._ray.cluster_resources().get("CPU", 0)
        places = max(1, int(cores // self._threads))
        return places if self._asked is None else min(places, self._asked)


def compute_part(shared: tuple[TaskSpec, OutputForm, int], part: Part) -> tuple[Computed, list[str]]:
    """Compute one part in a worker of Ray, which keeps its task for the next."""
    import torch

    spec, form, threads = shared
    key = repr(spec)
    if key not in _opened:
        torch.set_num_threads(threads)
        from torchwright.map.tasks.registry import open_task

        _opened.clear()
        _opened[key] = open_task(spec)
    task = _opened[key]
    return compute(task, part, form), list(task.notices)


def _environment(threads: int) -> dict[str, str]:
    """Return the variables of this process that a task needs on its node as well."""
    names = ("PYTHONPATH", "TORCHWRIGHT_CACHE", "HF_HOME", "HF_HUB_OFFLINE")
    given = {name: os.environ[name] for name in names if name in os.environ}
    return given | {"OMP_NUM_THREADS": str(threads)}
