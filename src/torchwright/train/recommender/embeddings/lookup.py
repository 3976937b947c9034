"""Looking up one shard: pooled embeddings forward, and the optimizer's step on the rows that were used backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from torchwright.train.recommender.embeddings.optimizers import RowOptimizer, State, wide
from torchwright.train.recommender.embeddings.tables import Jagged


class ShardTensors:
    """A shard's rows and columns (R, C), and its optimizer's state."""

    def __init__(self, weight_RC: torch.Tensor, optimizer: RowOptimizer) -> None:
        self.weight_RC, self.optimizer = weight_RC, optimizer
        self.state: State = optimizer.new_state(weight_RC)

    def pooled(
        self, ids: torch.Tensor, lengths: torch.Tensor, scale: float, anchor: torch.Tensor
    ) -> torch.Tensor:
        """The sums (N, C) over bags of rows; `anchor` makes autograd come by here.

        Backward, the gradient times `scale` is summed for each row, and the optimizer steps at once.
        """
        return _FusedLookup.apply(anchor, ids, lengths, self, scale)  # pyright: ignore[reportReturnType]


class _FusedLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        shard: ShardTensors,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids, lengths)
        ctx.shard, ctx.scale = shard, scale
        if not len(ids):
            return shard.weight_RC.new_zeros(len(lengths), shard.weight_RC.shape[1])
        offsets = lengths.cumsum(0) - lengths
        return F.embedding_bag(ids, shard.weight_RC, offsets, mode="sum")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        ids, lengths = ctx.saved_tensors
        shard, (grad_NC,) = ctx.shard, grads
        rows_U, place_I = ids.unique(return_inverse=True)
        grad_UC = grad_NC.new_zeros(len(rows_U), grad_NC.shape[1], dtype=wide(grad_NC.dtype))
        grad_UC.index_add_(0, place_I, grad_NC[Jagged(ids, lengths).bags()].to(grad_UC.dtype))
        shard.optimizer.update(shard.weight_RC, shard.state, rows_U, grad_UC * ctx.scale)
        return None, None, None, None, None
