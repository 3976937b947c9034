"""All-to-all of pieces of different sizes, forward for values and backward for their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def exchange(
    sent: torch.Tensor, out: Sequence[int], into: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send the first `out[0]` elements of a vector to the group's first process, and so on; `into` are received."""
    received = sent.new_empty(sum(into))
    dist.all_to_all_single(received, sent.contiguous(), list(into), list(out), group=group)
    return received


def exchange_with_gradient(
    sent: torch.Tensor, out: Sequence[int], into: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """`exchange`, whose backward pass sends the gradients back the same way."""
    return _Exchange.apply(sent, tuple(out), tuple(into), group)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sent: torch.Tensor, out: tuple[int, ...], into: tuple[int, ...], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.out, ctx.into, ctx.group = out, into, group
        return exchange(sent, out, into, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange(grads[0], ctx.into, ctx.out, ctx.group), None, None, None
