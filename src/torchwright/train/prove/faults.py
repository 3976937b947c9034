"""Seeded faults, for tests only: what silent parallelism bugs of the field look like, to see that a proof names them.

Each replaces one function of training code while the context lasts. Nothing outside tests asks for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate

from torchwright.train.loss import IGNORE, shift_labels
from torchwright.train.model import Transformer
from torchwright.train.parallel import batch, experts, gradients

TRAIN = "torchwright.train"


@contextlib.contextmanager
def seed(name: str) -> Iterator[None]:
    """Have the fault `name` of `FAULTS` in this process."""
    with FAULTS[name]():
        yield


def _loss_halved() -> Any:
    """torchtitan#3280: with tp the loss is a DTensor and returned before it is summed over cp."""

    def reported(total: torch.Tensor, everywhere: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
        if mesh is not None and mesh["tp"].size() > 1:
            return total.detach() / everywhere
        return (total.detach() if mesh is None else batch.global_sum(total, mesh)) / everywhere

    return patch(f"{TRAIN}.prove.steps.reported_loss", reported)


class _Mislabelled(torch.autograd.Function):
    """Identity whose gradient is called replicated though it is a part of a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        if isinstance(gradient, DTensor):
            return DTensor.from_local(
                gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False
            )
        return gradient


def _chunked_loss() -> Any:
    """torchtitan#3412: a chunked loss collects the hidden states' gradients under the placement of the states."""
    from torchwright.train.loss import chunked_loss

    def wrong(logits: Any, hidden_BTE: torch.Tensor, labels_BT: torch.Tensor, chunk: int) -> Any:
        return chunked_loss(logits, _Mislabelled.apply(hidden_BTE), labels_BT, chunk)  # type: ignore[arg-type]

    return patch(f"{TRAIN}.model.transformer.chunked_loss", wrong)


def _experts_doubled() -> Any:
    """pytorch#160285: experts' gradients, summed over ep already, get no part of the mean that others get."""
    compute = experts.ParallelExperts.__call__

    def wrong(
        self: experts.ParallelExperts, x_SE: torch.Tensor, counts_X: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        ways = 1 if self.ep is None else self.ep.size()
        gate, up, down = (matrix * ways - matrix.detach() * (ways - 1) for matrix in rest[:3])
        return compute(self, x_SE, counts_X, gate, up, down, rest[3])

    return patch.object(experts.ParallelExperts, "__call__", wrong)


@contextlib.contextmanager
def _average_sums() -> Iterator[None]:
    """pytorch#162338: a trainer relies on FSDP's mean, and gloo's reduce-scatter sums where AVG was asked for.

    Only float32 asks for it: in float64 FSDP divides sums by itself.
    """
    reduce_scatter = DefaultReduceScatter.__call__

    def sums(self: DefaultReduceScatter, op: Any, **rest: Any) -> Any:
        return reduce_scatter(self, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **rest)

    def means(model: Transformer) -> None:
        """FSDP's own mean, and each gradient multiplied by the number of processes afterwards."""
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            ways = parameter.device_mesh.size()
            parameter.register_post_accumulate_grad_hook(lambda p, ways=ways: p.grad.mul_(ways))

    with (
        patch(f"{TRAIN}.parallel.apply.sum_gradients", means),
        patch.object(DefaultReduceScatter, "__call__", sums),
    ):
        yield


def _labels_lost() -> Any:
    """DeepSpeed#8457: labels are shifted in each part of a sequence, so that its last token has none."""
    divide = batch.local_batch

    def wrong(*arguments: Any) -> Any:
        ids, labels, positions = divide(*arguments)
        shifted = shift_labels(ids)
        return ids, shifted.masked_fill(labels == IGNORE, IGNORE), positions

    return patch(f"{TRAIN}.prove.steps.local_batch", wrong)


def _gather_without_sum() -> Any:
    """pytorch#153016: an all-gather whose gradient is taken as whole, though each process has a part of the sum."""
    return patch.object(experts._CopyIn, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


def _norms_not_summed() -> Any:
    """Megatron-LM#1446: sequence parallelism, and norms' gradients stay as each process's own tokens made them."""
    return patch.object(FSDPParam, "_get_grad_inner_tensor", lambda _, gradient: gradient.to_local())


def _norm_of_own_shard() -> Any:
    """torchtune#2420: clipping by the norm of what a process holds itself."""

    def wrong(parameters: Any) -> torch.Tensor:
        own = [
            p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            for p in parameters
            if p.grad is not None
        ]
        return torch.stack([gradient.norm() for gradient in own]).norm()

    return patch.object(gradients, "grad_norm", wrong)


@contextlib.contextmanager
def _mean_of_means() -> Iterator[None]:
    """Each process divides by its own number of labels, and the means are averaged."""
    divide, own = batch.local_batch, []

    def counting(*arguments: Any) -> Any:
        part = divide(*arguments)
        own[:] = [(part[1] != IGNORE).sum()]
        return part

    def mean(total: torch.Tensor, everywhere: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
        return total / everywhere if mesh is None else total / own[0] / _batch_ways(mesh)

    def reported(total: torch.Tensor, everywhere: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
        part = mean(total.detach(), everywhere, mesh)
        return part if mesh is None else batch.global_sum(part, mesh)

    with (
        patch(f"{TRAIN}.prove.steps.local_batch", counting),
        patch(f"{TRAIN}.prove.steps.differentiated_loss", mean),
        patch(f"{TRAIN}.prove.steps.reported_loss", reported),
    ):
        yield


def _batch_ways(mesh: DeviceMesh | None) -> int:
    """How many processes see tokens of their own."""
    return 1 if mesh is None else mesh.size() // mesh["tp"].size()


FAULTS: dict[str, Callable[[], Any]] = {
    "loss halved": _loss_halved,
    "chunked loss": _chunked_loss,
    "experts doubled": _experts_doubled,
    "average sums": _average_sums,
    "labels lost": _labels_lost,
    "gather without sum": _gather_without_sum,
    "norms not summed": _norms_not_summed,
    "norm of own shard": _norm_of_own_shard,
    "mean of means": _mean_of_means,
}
