"""Collectives that a rewritten graph calls between processes, each with its exact adjoint.

The graph is differentiated as one program over all processes whose loss is the sum of what each of them has. So the
adjoint of a sum that everybody receives is the sum of everybody's gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import _resolve_process_group


def part(x: torch.Tensor, dim: int, outer: int, group: str) -> torch.Tensor:
    """This process's part of a tensor that every process has whole (`placement.Shard`)."""
    rank, ways = _place(group)
    return x.unflatten(dim, (outer, ways, -1)).select(dim + 1, rank).flatten(dim, dim + 1)


def exchange(x: torch.Tensor, whole: int, divided: int, group: str) -> torch.Tensor:
    """All-to-all: axis `whole`, of which a process had a part, becomes whole, and axis `divided` the other way."""
    return _Exchange.apply(x, whole, divided, group)  # pyright: ignore[reportReturnType]


def total(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of what the processes have, for each of them."""
    return _Total.apply(x, group, True)  # pyright: ignore[reportReturnType]


def total_loss(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of the processes' terms of the loss. Each of them calls `backward`, so a term's gradient is its own."""
    return _Total.apply(x, group, False)  # pyright: ignore[reportReturnType]


def shared(parameter: torch.Tensor, group: str) -> torch.Tensor:
    """A parameter of which every process has a copy: their gradients are summed."""
    return _Shared.apply(parameter, group)  # pyright: ignore[reportReturnType]


def selected(x: torch.Tensor, dim: int, index: int, group: str) -> torch.Tensor:
    """`x.select(dim, index)` of the whole tensor where this process has that place, zeros elsewhere."""
    rank, ways = _place(group)
    size = x.shape[dim]
    owner, place = divmod(index % (size * ways), size)
    # Masked and not left out: every process's graph must ask for the same gradients.
    return x.select(dim, place).masked_fill(torch.tensor(owner != rank, device=x.device), 0)


def token_mean(
    kind: str,
    scores: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    group: str,
) -> torch.Tensor:
    """This process's term of a mean over the labels of all processes; `kind` is `cross_entropy` or `nll_loss`.

    A mean of means would weight a token by how many of its neighbours count.
    """
    counted = labels != ignore_index
    weights = counted if weight is None else weight[labels.where(counted, 0)] * counted
    count = total(weights.sum().to(scores.dtype), group)
    options: dict[str, Any] = {"label_smoothing": smoothing} if kind == "cross_entropy" else {}
    summed = getattr(F, kind)(scores, labels, weight, ignore_index=ignore_index, reduction="sum", **options)
    return summed / count


def _place(group: str) -> tuple[int, int]:
    found = _group(group)
    return found.rank(), found.size()


def _group(name: str) -> dist.ProcessGroup:
    # A graph holds plain values only.
    return _resolve_process_group(name)  # pyright: ignore[reportArgumentType]


def _all_to_all(x: torch.Tensor, whole: int, divided: int, group: str) -> torch.Tensor:
    _, ways = _place(group)
    # First axis: whose it becomes; after the exchange, whose it was.
    sent = x.unflatten(divided, (ways, -1)).movedim(divided, 0).contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=_group(group))
    return arrived.movedim(0, whole).flatten(whole, whole + 1)


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=_group(group))
    return summed


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, whole: int, divided: int, group: str) -> torch.Tensor:
        ctx.way = whole, divided, group
        return _all_to_all(x, whole, divided, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        whole, divided, group = ctx.way
        return _all_to_all(grads[0], divided, whole, group), None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, everybodys: bool) -> torch.Tensor:
        ctx.group, ctx.everybodys = group, everybodys
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (_all_reduce(grads[0], ctx.group) if ctx.everybodys else grads[0]), None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _all_reduce(grads[0], ctx.group), None
