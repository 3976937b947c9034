"""Quality of a recommender on held-out rows, over all processes: AUC, log loss, normalized entropy, recall."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchwright.train.recommender.config import RecommenderRun
from torchwright.train.recommender.layout import look_ups
from torchwright.train.recommender.learner import RecommenderLearner
from torchwright.train.recommender.models import Towers
from torchwright.train.recommender.store import ClickBatch, Clicks, RowStream

Figures = dict[str, float]
COMPARED = 1 << 24
"""Scores that are compared at once."""


def measure_quality(
    run: RecommenderRun, learner: RecommenderLearner, clicks: Clicks, device: str
) -> Figures | None:
    """Return metrics of the held-out rows, the same on every process; None if there are no rows. Collective."""
    if clicks.validation is None:
        return None
    count = min(len(clicks.validation), run.evaluation.samples)
    with torch.no_grad():
        if run.two_tower is None:
            return _of_clicks(run, learner, clicks.validation, count, device)
        return _of_towers(run, learner, clicks, count, device)


def parts(rows: RowStream, count: int, size: int, device: str) -> Iterator[ClickBatch]:
    """This process's part of each `size` of the first `count` rows: every process gives as many, and some are empty."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for first in range(0, count, size):
        whole = min(size, count - first)
        begin, end = (whole * place // world for place in (rank, rank + 1))
        yield rows.batch(first + begin, end - begin, device)


def _of_clicks(
    run: RecommenderRun, learner: RecommenderLearner, rows: RowStream, count: int, device: str
) -> Figures:
    logits, clicked = [], []
    for batch in parts(rows, count, run.batch, device):
        embedded = learner.tables(look_ups(run, batch))
        logits.append(learner.dense(batch.numbers_BD, embedded).double().cpu())
        clicked.append(batch.clicked_B.double().cpu())
    return click_figures(everywhere(torch.cat(logits)), everywhere(torch.cat(clicked)))


def click_figures(logits_N: torch.Tensor, clicked_N: torch.Tensor) -> Figures:
    """AUC where there are clicks and others; log loss in nats; that over the entropy of the mean click rate (He et al.,
    2014: normalized entropy), below 1 where rows tell more than the mean.
    """
    loss = float(torch.nn.functional.binary_cross_entropy_with_logits(logits_N, clicked_N))
    rate = float(clicked_N.mean())
    figures = {"validation_loss": loss}
    if 0 < rate < 1:
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        figures |= {"auc": auc(logits_N, clicked_N), "normalized_entropy": loss / entropy}
    return figures


def auc(score_N: torch.Tensor, clicked_N: torch.Tensor) -> float:
    """Return the probability that a clicked row scores above another one, with ties as a half: the sum of mid-ranks."""
    _, place_N, counts = score_N.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    rank_N = (last - (counts - 1) / 2)[place_N]
    ones = float(clicked_N.sum())
    above = float(rank_N[clicked_N > 0].sum()) - ones * (ones + 1) / 2
    return above / (ones * (len(clicked_N) - ones))


def _of_towers(
    run: RecommenderRun, learner: RecommenderLearner, clicks: Clicks, count: int, device: str
) -> Figures:
    """recall@k: the share of held-out rows whose item is among the k best of all items that the files hold."""
    assert run.two_tower is not None
    assert clicks.validation is not None
    assert isinstance(learner.dense, Towers)
    items, place = distinct_items(run, clicks), len(run.two_tower.user)
    vectors, ids = [], []
    for batch in parts(items, len(items), run.batch, device):
        vectors.append(_vectors("item", run, learner, batch))
        ids.append(batch.categories_BC[:, place])
    # They come process by process, not in the order of the rows.
    vectors_IE, id_I = everywhere(torch.cat(vectors)), everywhere(torch.cat(ids)).cpu()
    number = torch.full((int(id_I.max()) + 1,), -1)
    number[id_I] = torch.arange(len(id_I))
    ahead = []
    for batch in parts(clicks.validation, count, run.batch, device):
        users_BE = _vectors("user", run, learner, batch)
        right_B = number[batch.categories_BC[:, place].cpu()].to(device)
        for some in torch.arange(len(batch)).split(max(1, COMPARED // len(items))):
            scores_BI = users_BE[some] @ vectors_IE.T
            own_B1 = scores_BI.gather(1, right_B[some, None])
            # Of items that score alike half stand before the right one.
            ahead.append(
                ((scores_BI > own_B1).sum(1) + ((scores_BI == own_B1).sum(1) - 1) / 2).double().cpu()
            )
    ahead_N = everywhere(torch.cat(ahead) if ahead else torch.empty(0, dtype=torch.float64))
    return {
        f"recall@{k}": float((ahead_N < k).double().mean())
        for k in run.evaluation.recall_at
        if k <= len(items)
    } | {"items": float(len(items))}


def distinct_items(run: RecommenderRun, clicks: Clicks) -> RowStream:
    """A row for each item of the files, the first one that has it, in the order of their ids."""
    assert run.two_tower is not None
    place, found = 1 + len(run.two_tower.user), {}
    for rows in filter(None, (clicks.train, clicks.validation)):
        for first in range(0, len(rows), COMPARED >> 4):
            block = rows.take(first, min(COMPARED >> 4, len(rows) - first))
            ids, at = np.unique(block[:, place], return_index=True)
            for item, row in zip(ids.tolist(), block[at], strict=True):
                found.setdefault(item, row)
    return RowStream([np.stack([found[item] for item in sorted(found)])], clicks.train.columns)


def _vectors(tower: str, run: RecommenderRun, learner: RecommenderLearner, batch: ClickBatch) -> torch.Tensor:
    assert isinstance(learner.dense, Towers)
    return learner.dense.vectors(tower, learner.tables(look_ups(run, batch)))


def everywhere(own: torch.Tensor) -> torch.Tensor:
    """Every process's rows, in the order of the processes; they may have different numbers of them."""
    if dist.get_world_size() == 1:
        return own
    all_: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_, own.cpu().numpy())
    return torch.cat([torch.from_numpy(part) for part in all_]).to(own.device)
