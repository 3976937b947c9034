"""Losses: the log loss of clicks, or of in-batch items with the sampling corrected."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn import functional as F

from torchwright.train.recommender.config import RecommenderRun
from torchwright.train.recommender.store import ClickBatch, Clicks, RowStream

COUNTED = 1 << 20
"""Rows that are counted at once."""


class Loss(Protocol):
    """The mean over this process's rows of what the dense layers gave for a batch."""

    def __call__(self, given: Any, batch: ClickBatch) -> torch.Tensor: ...


def make_loss(run: RecommenderRun, clicks: Clicks, device: str) -> Loss:
    """The loss of the run's model."""
    if run.two_tower is None:
        return click_loss
    item = len(run.two_tower.user)
    log_q = log_frequency(clicks.train, item, next(iter(run.two_tower.item.values())))
    return InBatchLoss(run.two_tower.temperature, log_q.to(device), item)


def click_loss(given: torch.Tensor, batch: ClickBatch) -> torch.Tensor:
    """Binary cross entropy, in nats, of logits (B,)."""
    return F.binary_cross_entropy_with_logits(given, batch.clicked_B.to(given.dtype))


class InBatchLoss:
    """Softmax over the items of the step's whole batch, of all processes (Yi et al., 2019).

    An item stands in a batch as often as it is clicked, which a score would learn in place of what users want: log q,
    the logarithm of that frequency, is taken from each score. Where the row's own item stands in the batch again it is
    no wrong answer, and left out.
    """

    def __init__(self, temperature: float, log_q_R: torch.Tensor, item: int) -> None:
        """`item` is the place among the categories of the column that tells items apart, `log_q_R` by its ids."""
        self.temperature, self.log_q_R, self.item = temperature, log_q_R, item

    def __call__(self, given: tuple[torch.Tensor, torch.Tensor], batch: ClickBatch) -> torch.Tensor:
        users_BE, own_BE = given
        own_B = batch.categories_BC[:, self.item]
        items_NE, ids_N, first = own_BE, own_B, 0
        if dist.get_world_size() > 1:
            # The gradient of each item is the sum of what every process's rows give.
            items_NE, ids_N = _Gathered.apply(own_BE), _gather(own_B)
            first = dist.get_rank() * len(own_B)
        scores_BN = users_BE @ items_NE.T / self.temperature
        scores_BN = scores_BN - self.log_q_R[ids_N].to(scores_BN.dtype)
        right_B = torch.arange(first, first + len(own_B), device=own_B.device)
        again_BN = ids_N == own_B[:, None]
        again_BN[torch.arange(len(own_B), device=own_B.device), right_B] = False
        return F.cross_entropy(scores_BN.masked_fill(again_BN, -torch.inf), right_B)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_BE: torch.Tensor) -> torch.Tensor:
        return _gather(own_BE)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grad_NE = grads[0].contiguous()
        dist.all_reduce(grad_NE)
        rows = len(grad_NE) // dist.get_world_size()
        return grad_NE[dist.get_rank() * rows :][:rows]


def _gather(own: torch.Tensor) -> torch.Tensor:
    """Every process's rows, one after another; all have as many."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts)


def log_frequency(rows: RowStream, category: int, size: int) -> torch.Tensor:
    """log q (size,) float32: how often each id stands in a category of the training rows, at least once."""
    counts = torch.zeros(size, dtype=torch.int64)
    column = 1 + len(rows.columns.numbers) + category
    for first in range(0, len(rows), COUNTED):
        ids = rows.take(first, min(COUNTED, len(rows) - first))[:, column]
        counts += torch.bincount(torch.from_numpy(ids.copy()), minlength=size)
    return (counts.clamp_min(1).double() / len(rows)).log().float()
