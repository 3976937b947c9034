"""One optimizer step: micro-batches forward and backward, the loss over all processes, clipping, the update.

Also what is applied to a model before its first step: recomputation and compilation, layer by layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint

from torchwright.optimization.engines.compiled.compiler_caches import use_private_caches
from torchwright.train.model import Transformer
from torchwright.train.model.foreign import Foreign
from torchwright.train.parallel import clip_grad_norm, grad_norm
from torchwright.train.parallel.pipeline import PipelineRunner
from torchwright.train.run.objectives.objective import MicroBatch as MicroBatch
from torchwright.train.run.objectives.objective import Objective

AnyBatch = TypeVar("AnyBatch")
_SAVED = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torchwright_train.ring_attention.default,
    torch.ops.torchwright_train.recurrence.default,
)
"""Operators whose results selective recomputation keeps, because they are slow to compute again."""
_MARKS = (
    torch.ops.profiler._record_function_enter.default,
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
"""The profiler's marks. FSDP sets them around experts, which it gathers within a layer, more often when a layer is
computed again; torch 2.13 counts every operator and takes that for another computation."""


def recompute(model: Transformer | Foreign, how: Literal["none", "selective", "full"]) -> None:
    """Let each layer forget its activations and compute them again in the backward pass (Chen et al., 2016).

    `full` keeps a layer's input alone; `selective` also what matrix products and attention gave.
    """
    if how == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        checkpoint.SAC_IGNORED_OPS.update(_MARKS)
        options["context_fn"] = functools.partial(
            checkpoint.create_selective_checkpoint_contexts, list(_SAVED)
        )
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint.checkpoint, layer.forward, **options)


def let_signals_in(model: Transformer | Foreign) -> None:
    """Have Python handle signals between two layers of the backward pass, which is one call of C++ else."""

    def watch(_layer: nn.Module, _inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _gradient: None)

    for layer in model.layers:
        layer.register_forward_hook(watch)


def compile_blocks(model: Transformer) -> None:
    """Compile every layer; they share code, so that the compiler runs once for all that are alike."""
    use_private_caches()
    for layer in model.layers:
        layer.compile(dynamic=False)


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The figures of a step, equal on every process."""

    loss: float
    """Its mean over the batch, before the update: nats per token where tokens are what counts."""
    grad_norm: float
    """Before clipping."""
    leave: bool
    """True if any process was asked to leave."""
    failed: bool
    """True if background work of any process has failed."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Figures that the objective reports with its loss."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def gradients(
    model: nn.Module,
    objective: Objective[AnyBatch],
    batches: Sequence[AnyBatch],
    *,
    copies: int,
    precision: AbstractContextManager[Any],
    clip: float | None,
    pipeline: PipelineRunner | None = None,
    leave: bool = False,
    failed: bool = False,
) -> StepFigures:
    """Compute the gradients of one step, clipped to the norm `clip`; the optimizers have not moved yet.

    Every sum is divided by the number of items (labels, pairs) over all micro-batches of all processes. So a token
    weighs the same wherever it is computed. `copies` processes see the same tokens (tensor
    parallelism and pipeline stages). A `pipeline` takes the micro-batches in the order of its schedule.
    """
    count, stages = counted_everywhere(objective, batches, copies), 1
    total = count.new_zeros(1 + len(objective.figures))
    if pipeline is not None:
        total, stages = pipeline.backward(cast(Any, batches), count)[None], pipeline.processes
    for batch in batches if pipeline is None else ():
        with precision:
            loss, more = objective(batch)
        (loss / count.to(loss.dtype)).backward()
        total += torch.cat([loss.detach()[None], more])
    # One message for the loss and for what one process must tell the others.
    told = torch.cat([total / (count * copies), total.new_tensor([leave, failed])])
    if dist.get_world_size() > 1:
        dist.all_reduce(told)
    mean, *more, leaving, failing = told.tolist()
    parameters = model.parameters()
    norm = grad_norm(parameters, stages) if clip is None else clip_grad_norm(parameters, clip, stages)
    return StepFigures(
        loss=mean,
        grad_norm=float(norm),
        leave=leaving > 0,
        failed=failing > 0,
        more=dict(zip(objective.figures, more, strict=True)),
    )


def counted_everywhere(
    objective: Objective[AnyBatch], batches: Sequence[AnyBatch], copies: int
) -> torch.Tensor:
    """Return the number of items in a step over all processes, of which `copies` see the same."""
    count = torch.stack([objective.count(batch) for batch in batches]).sum().double()
    if dist.get_world_size() > 1:
        dist.all_reduce(count)
    return count / copies
