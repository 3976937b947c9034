"""The processes that compute a model together: how they meet, and what they tell each other."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchwright.core.errors import TorchwrightError, first_line
from torchwright.hardware.kernels.cpu.shared_memory import open_shared

log = logging.getLogger("torchwright.models.decoder.tensor_parallel")


class ProcessesError(TorchwrightError):
    """Processes that cannot meet, or have lost each other."""


@dataclass(frozen=True)
class Processes:
    """The processes of a model, as one of them sees them. All make the same calls in the same order."""

    rank: int
    ways: int
    shared: Any = None
    """The memory that processes of one machine share; None where `torch.distributed` carries everything."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all processes' tensors, the same bits in each of them; `x` may hold it.

        Raises `ProcessesError` where one of them has ended.
        """
        x = x.contiguous()
        try:
            if self.shared is None:
                dist.all_reduce(x)
            else:
                self.shared.sum(x)
        except RuntimeError as error:
            raise self._lost(error) from error
        return x

    def join_last(self, x_NV: torch.Tensor, features: int) -> torch.Tensor:
        """Return (N, features) of the parts of the last dimension that each process has (`own`); errors are `sum`'s."""
        most = -(-features // self.ways)
        x_NV = torch.nn.functional.pad(x_NV, (0, most - x_NV.shape[-1])).contiguous()
        try:
            if self.shared is None:
                parts = [torch.empty_like(x_NV) for _ in range(self.ways)]
                dist.all_gather(parts, x_NV)
            else:
                parts = self.shared.gather(x_NV)
        except RuntimeError as error:
            raise self._lost(error) from error
        counts = [len(own(features, rank, self.ways)) for rank in range(self.ways)]
        return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], -1)

    def _lost(self, error: RuntimeError) -> ProcessesError:
        return ProcessesError(
            f"the {self.ways} processes of the model have lost each other",
            found=first_line(error),
            next="see what the others said, and start all again",
        )


def own(count: int, rank: int, ways: int) -> range:
    """The part of `count` things that a process has: equal parts where they divide."""
    return range(count * rank // ways, count * (rank + 1) // ways)


def meet(ways: int, device: str) -> Processes:
    """Join the processes that torchrun started, which have to be `ways`; collective.

    A process group that exists already is taken as it is. Raises `ProcessesError` where there are not as many.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise _wrong(ways, "one process, which torchrun did not start")
        world = os.environ["WORLD_SIZE"]
        if world != str(ways):
            raise _wrong(ways, f"{world} processes")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        try:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
        except (ValueError, RuntimeError) as error:
            raise ProcessesError(
                "the processes of the model cannot meet",
                found=first_line(error),
                next="see whether MASTER_ADDR and MASTER_PORT can be reached from each",
            ) from error
    if dist.get_world_size() != ways:
        raise _wrong(ways, f"{dist.get_world_size()} processes")
    shared = None
    if device == "cpu":
        shared, reason = open_shared()
        if shared is None:
            log.info("torchwright: the processes share no memory (%s); they use gloo", reason)
    return Processes(dist.get_rank(), ways, shared)


def _wrong(ways: int, found: str) -> ProcessesError:
    return ProcessesError(
        f"tp={ways} takes {ways} processes",
        found=found,
        next=f"start them with torchrun --nproc-per-node {ways} SCRIPT",
    )
