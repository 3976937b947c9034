"""Cross-entropy over logits whose vocabulary is divided among processes; the logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

IGNORE = -100
"""A label that does not count: after a sequence's last token, and padding."""


def vocabulary_parallel_nll(logits_BTV: DTensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """The summed negative log-likelihood of labels (B, T), the same on every process of the logits' mesh.

    Three scalars a token are exchanged: the largest logit, the sum of exponentials, the label's own logit.
    """
    mesh = logits_BTV.device_mesh
    assert logits_BTV.placements == (Shard(logits_BTV.ndim - 1),), logits_BTV.placements
    shape, offset = compute_local_shape_and_global_offset(logits_BTV.shape, mesh, logits_BTV.placements)
    local_NV = logits_BTV.to_local().flatten(0, -2)
    return _NLL.apply(local_NV, labels_BT.flatten(), offset[-1], shape[-1], mesh.get_group())  # type: ignore[return-value]


class _NLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        labels_N: torch.Tensor,
        first: int,
        count: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        score_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        largest_N = score_NV.amax(-1) if count else score_NV.new_full(labels_N.shape, float("-inf"))
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        exp_NV = (score_NV - largest_N[:, None]).exp()
        sum_N = exp_NV.sum(-1)
        dist.all_reduce(sum_N, group=group)

        valid_N = labels_N != IGNORE
        here_N = valid_N & (labels_N >= first) & (labels_N < first + count)
        column_N = (labels_N - first).masked_fill(~here_N, 0)
        own_N = score_NV.new_zeros(labels_N.shape)
        if count:
            own_N = score_NV.gather(1, column_N[:, None])[:, 0].masked_fill(~here_N, 0)
        dist.all_reduce(own_N, group=group)
        nll_N = (sum_N.log() + largest_N - own_N).masked_fill(~valid_N, 0)

        ctx.save_for_backward(exp_NV.div_(sum_N[:, None]), here_N, column_N, valid_N)
        ctx.dtype = logits_NV.dtype
        return nll_N.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probability_NV, here_N, column_N, valid_N = ctx.saved_tensors
        # Not in place: a retained graph goes through here again.
        gradient_NV = probability_NV * valid_N[:, None]
        if gradient_NV.shape[1]:
            gradient_NV.scatter_add_(1, column_N[:, None], -here_N[:, None].to(gradient_NV.dtype))
        return (gradient_NV * gradients[0]).to(ctx.dtype), None, None, None, None
