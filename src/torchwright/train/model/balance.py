"""Balancing of experts: an auxiliary loss that draws tokens to those with few, and how many tokens each was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce, wait_tensor


class BalancingLoss:
    """Adds coefficient · X · Σ f_x p_x as a gradient alone (Fedus et al., 2022; Lepikhin et al., 2021).

    f_x is the share of all choices that fell on expert x, p_x the router's mean probability for it, both over the
    tokens of a micro-batch on all processes of `groups`, including padding. A step takes the mean over its
    micro-batches, added up over layers; the reported loss excludes it.
    """

    def __init__(self, coefficient: float, micro_batches: int, groups: Sequence[ProcessGroup]) -> None:
        self.factor, self.groups = coefficient / micro_batches, tuple(groups)

    def __call__(
        self, share_TC: torch.Tensor, share_TX: torch.Tensor, counts_X: torch.Tensor
    ) -> torch.Tensor:
        """`share_TC` as it is; backward, `share_TX` receives the loss's gradient as well."""
        tokens, experts = share_TX.shape
        for group in self.groups:
            counts_X = wait_tensor(all_reduce(counts_X, "sum", group))
            tokens *= group.size()
        choices = tokens * share_TC.shape[1]
        weight_X = counts_X.to(share_TX.dtype) * (self.factor * experts / choices / tokens)
        return _Balanced.apply(share_TC, share_TX, weight_X)  # type: ignore[return-value]


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, share_TC: torch.Tensor, share_TX: torch.Tensor, weight_X: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(weight_X)
        ctx.tokens = share_TX.shape[0]
        return share_TC.view_as(share_TC)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight_X,) = ctx.saved_tensors
        return gradients[0], weight_X.expand(ctx.tokens, -1), None


class Load:
    """The number of choices that fell on each expert of a layer, of this process alone, until they are taken."""

    def __init__(self, experts: int, device: torch.device | str) -> None:
        self.counts_X = torch.zeros(experts, dtype=torch.int64, device=device)

    def __call__(
        self, share_TC: torch.Tensor, share_TX: torch.Tensor, counts_X: torch.Tensor
    ) -> torch.Tensor:
        """`share_TC` as it is; backward, `counts_X` are added: once a micro-batch, in no evaluation."""
        return _Counted.apply(share_TC, counts_X, self.counts_X)  # type: ignore[return-value]


class _Counted(torch.autograd.Function):
    """Adds up in the backward pass, which a step goes through once, also where the forward pass is computed again."""

    @staticmethod
    def forward(
        ctx: Any, share_TC: torch.Tensor, counts_X: torch.Tensor, total_X: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(counts_X)
        ctx.total_X = total_X
        return share_TC.view_as(share_TC)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (counts_X,) = ctx.saved_tensors
        ctx.total_X += counts_X
        return gradients[0], None, None
