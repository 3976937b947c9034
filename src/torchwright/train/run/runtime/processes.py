"""The processes of a run: joining them, checking that they are alike, work that one does for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchwright.core.errors import TorchwrightError, first_line
from torchwright.train.hang.watch import turn_on
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import RunFile
from torchwright.train.run.config.run_file import changed_fields
from torchwright.train.run.runtime import torchrun
from torchwright.train.run.runtime.meeting import meet

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ProcessRank:
    """This process among those of the run, and the device it computes on."""

    rank: int
    world: int
    device: str
    """cpu or cuda."""
    again: bool = False
    """True on the first process if its launcher has started the processes again after a failure."""

    @property
    def first(self) -> bool:
        """Check whether this process reports for all."""
        return self.rank == 0


@contextmanager
def processes(timeout_s: float) -> Generator[ProcessRank]:
    """Join the processes that torchrun started, or be the only one; leave them at the end.

    One process has a group too, so that everything below is the same for one and for many.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    joined = not dist.is_initialized()
    with _infrastructure():
        again = _join(device, timeout_s) if joined else False
        try:
            yield ProcessRank(
                rank=dist.get_rank(),
                world=dist.get_world_size(),
                device=device,
                again=again or torchrun.restarts() > 0,
            )
        finally:
            if joined and dist.is_initialized():
                dist.destroy_process_group()


def _join(device: str, timeout_s: float) -> bool:
    """Make the process group; return True on the first process if the processes were started before."""
    timeout, again = timedelta(seconds=timeout_s), False
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        if torchrun.started() is not None:
            turn_on()
            store, rank, world = next(dist.rendezvous("env://", timeout=timeout))  # pyright: ignore[reportPrivateImportUsage]
            start = meet(store, rank, world, timeout_s)
            again = start.again
            store = dist.PrefixStore(f"start-{start.name}", store)  # pyright: ignore[reportPrivateImportUsage]
        else:
            store, rank, world = dist.HashStore(), 0, 1  # pyright: ignore[reportPrivateImportUsage]
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        return again
    except ValueError as error:  # of a variable that is missing or no number
        raise RunError(
            "the processes cannot meet", found=str(error), next="start them with torchrun"
        ) from error


@contextmanager
def _infrastructure() -> Generator[None]:
    """Raise `RunError` for faults of the network or of another process."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        raise RunError(
            "the processes of the run cannot reach each other",
            found=first_line(error),
            next="see what the others said, and whether MASTER_ADDR and MASTER_PORT can be reached from each; "
            "then start all again",
        ) from error


def check_alike(run: RunFile) -> None:
    """Raise `RunError` on every process unless all have the same run; it names process and field."""
    runs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(runs, run.model_dump(mode="json"))
    for rank, other in enumerate(runs):
        different = changed_fields(runs[0], other)
        if different:
            raise RunError(
                f"the processes have different run files: process {rank} is not like process 0",
                found="; ".join(different),
                next="start every process with the same RUN.toml",
            )


def on_first(function: Callable[[], T]) -> T:
    """Call `function` on the first process; return its result or raise its fault on every process."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = function()
        except (TorchwrightError, OSError) as error:
            answer[1] = error
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
