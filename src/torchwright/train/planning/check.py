"""Measure a training step's memory: bytes of live tensors, counted operator by operator on the CPU.

The CPU's allocator keeps no statistics, so every tensor that an operator returns is watched for as long as its storage
lives. Its present size is read, since FSDP2 frees gathered parameters by resizing them to nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.data.batch import of_windows
from torchwright.train.layout import Layout
from torchwright.train.model import recurrence
from torchwright.train.parallel import ring
from torchwright.train.planning.accepted import run_fields
from torchwright.train.planning.job import Job, LayoutPlan
from torchwright.train.run.config.read import parse_run
from torchwright.train.run.objectives.objective import NextToken
from torchwright.train.run.objectives.optimizer import Optimizers
from torchwright.train.run.objectives.precision import autocast
from torchwright.train.run.objectives.setup import Batches, build_model
from torchwright.train.run.objectives.step import gradients

INSIDE = ring.INSIDE | recurrence.INSIDE


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; `peak` is the most that lived at once, tensors given to `watch` included."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def watch(self, values: Any) -> bool:
        """Count these tensors from now on; whether any of them is new."""
        new = False
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                storage = getattr(leaf, "_local_tensor", leaf).untyped_storage()
                known = self._storages.get(storage._cdata)
                if known is None or known() is None:
                    self._storages[storage._cdata] = weakref.ref(storage)
                    new = True
        return new

    def now(self) -> int:
        """Bytes that live at this moment."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Modes do not see what an operator of our own does.
        with self if func in INSIDE else contextlib.nullcontext():
            result = INSIDE.get(func, func)(*args, **(kwargs or {}))
        # Adding up is slow, and no peak comes about but by a new tensor.
        if self.watch(result):
            self.peak = max(self.peak, self.now())
        return result


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Bytes on one process."""

    parameters: int
    gradients: int
    """After the last backward pass."""
    optimizer: int
    peak: int
    """The most that lived at once in a step."""


def eager_step(
    layout: str, *, rows: int, context: int, precision: str, recompute: str, micro_batches: int
) -> tuple[Job, LayoutPlan]:
    """A step of `micro_batches` times `rows` rows of `context` tokens in each process; nothing is compiled."""
    parsed = Layout.parse(layout)
    tokens = parsed.batch_ways * rows * micro_batches * context
    settings: Any = {"precision": precision}
    job = Job(tokens_per_step=tokens, context=context, compile=False, **settings)
    kept: Any = {"recompute": recompute}
    return job, LayoutPlan(layout=parsed, micro_batch=rows, micro_batches=micro_batches, **kept)


def count_steps(cases: Sequence[tuple[DecoderConfig, Job, LayoutPlan]]) -> list[Counted]:
    """`count_step` of each, one after the other."""
    return [count_step(config, job, plan) for config, job, plan in cases]


def count_step(config: DecoderConfig, job: Job, plan: LayoutPlan) -> Counted:
    """Two of the trainer's own steps of `config`'s model in the plan's layout on random tokens; the second is counted.

    Collective: every process of the default group calls it, and the group is as large as the layout. Nothing is
    compiled, so the job must be eager.
    """
    assert not job.compile
    run = parse_run(run_fields(job, plan))
    model, mesh = build_model(run, config, Path(), "cpu")
    optimizers, loss = Optimizers(model, run.optimizer, compiled=False), NextToken(model, compiled=False)
    batches = Batches(run, mesh, "cpu")
    windows_BT = torch.randint(config.vocabulary, (plan.micro_batch, job.context + 1))
    micro_batches = [batches.prepare(of_windows(windows_BT))] * plan.micro_batches

    def gradient_bytes() -> int:
        gradients(
            model,
            loss,
            micro_batches,
            copies=plan.layout.tp,
            precision=autocast(run.precision, "cpu"),
            clip=run.clip,
        )
        return _size(parameter.grad for parameter in model.parameters())

    gradient_bytes()
    optimizers.step(1.0)
    live = LiveBytes()
    states = list(optimizers.tensors().values())
    live.watch([list(model.parameters()), states])
    with live:
        after = gradient_bytes()
        optimizers.step(1.0)
    return Counted(
        parameters=_size(model.parameters()),
        gradients=after,
        optimizer=_size(state for state in states if state.ndim),
        peak=live.peak,
    )


def _size(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of this process's parts."""
    locals_ = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None)
    return sum(tensor.numel() * tensor.element_size() for tensor in locals_)
