"""Training through pipeline stages: PyTorch's schedules over the stages that a process holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchwright.train.layout import Schedule
from torchwright.train.parallel.stages import Stage, Staged

SINGLE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
"""Names in `torch.distributed.pipelining`; schedules of one stage a process."""
MANY = {
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}


def owners(schedule: Schedule, pp: int, pieces: int) -> list[int]:
    """Return the process of each stage, from the first to the last: round-robin, or there and back with `zbv`."""
    rounds = [range(pp)] * pieces
    if schedule == "zbv":
        rounds = [range(pp), range(pp - 1, -1, -1)]
    return [process for turn in rounds for process in turn]


class PipelineBatch(Protocol):
    """A micro-batch (`MicroBatch`)."""

    @property
    def ids_BT(self) -> torch.Tensor: ...
    @property
    def labels_BT(self) -> torch.Tensor: ...
    @property
    def positions_BT(self) -> torch.Tensor | None: ...
    @property
    def documents_BS(self) -> torch.Tensor | None: ...


class PipelineRunner:
    """The micro-batches of a step through all stages, forward and backward."""

    def __init__(
        self,
        model: Staged,
        schedule: Schedule,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`precision` gives the context of a forward pass; backward passes come between them."""
        for stage in model.stages.values():
            stage.precision = precision
        self.model, self.schedule = model, schedule
        self.processes = dist.get_world_size(model.group)
        self._labels = torch.ones(())
        self._total = torch.zeros(())
        self._schedules: dict[tuple[int, ...], Any] = {}

    def backward(self, batches: Sequence[PipelineBatch], labels: torch.Tensor) -> torch.Tensor:
        """Add up every parameter's gradient of the summed negative log-likelihood by `labels`; gives that sum.

        Collective: every process of the pipeline has the same micro-batches, and gets the same sum.
        """
        first = batches[0]
        shape = (len(batches), *first.ids_BT.shape)
        if shape not in self._schedules:
            self._schedules[shape] = self._build(len(batches), first.ids_BT)
        rows = {
            name: torch.cat([getattr(batch, name) for batch in batches])
            for name in ("labels_BT", "positions_BT", "documents_BS")
            if getattr(first, name) is not None
        }
        ids = (torch.cat([batch.ids_BT for batch in batches]),) if 0 in self.model.stages else ()
        self._labels, self._total = labels, torch.zeros_like(labels)
        self._schedules[shape].step(*ids, target=rows["labels_BT"], return_outputs=False, **rows)
        dist.all_reduce(self._total, group=self.model.group)
        return self._total

    def _loss(self, nll: torch.Tensor, _labels_BT: torch.Tensor) -> torch.Tensor:
        self._total += nll.detach()
        return nll / self._labels.to(nll.dtype)

    def _build(self, micro_batches: int, ids_BT: torch.Tensor) -> Any:
        stages = [self._stage(stage, ids_BT) for stage in self.model.stages.values()]
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        from torch.distributed import pipelining

        if self.schedule in SINGLE:
            return getattr(pipelining, SINGLE[self.schedule])(stages[0], micro_batches, **options)
        return getattr(pipelining, MANY[self.schedule])(stages, micro_batches, **options)

    def _stage(self, stage: Stage, ids_BT: torch.Tensor) -> Any:
        from torch.distributed.pipelining import PipelineStage  # seconds, for it brings the compiler

        # Shapes are given, so that nothing has to be computed to find them.
        def told(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

        dtype = self.model.activation
        between = told(self.model.between(ids_BT), dtype)
        loss = told((), torch.promote_types(dtype, torch.float32))
        return PipelineStage(
            stage,
            stage.number,
            self.model.count,
            ids_BT.device,
            input_args=ids_BT.to("meta") if stage.first else between,
            output_args=loss if stage.last else between,
            group=self.model.group,
        )
