"""The reference for several processes, in plain code for one: whole tables, dense gradients, no messages.

A copy of the tables for each group, which learns from the rows of the group's processes; dense layers that learn from
all. Nothing of torchwright.train.recommender.embeddings is used but where a table is cut by columns, since row-wise
Adagrad then keeps a sum for each part.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.train.recommender.config import Embeddings, RecommenderRun
from torchwright.train.recommender.store import ClickBatch

Tables = dict[str, torch.Tensor]
Columns = tuple[int, int]


@dataclass
class Copy:
    """One group's copy of the tables, and what its rows' optimizer keeps: by table and columns."""

    tables: Tables
    state: dict[tuple[str, Columns], dict[str, torch.Tensor]] = field(default_factory=dict)


class Reference:
    """The run's steps for all of its groups."""

    def __init__(
        self, run: RecommenderRun, tables: Tables, dense: nn.Module, cuts: Mapping[str, Sequence[Columns]]
    ) -> None:
        """`tables` and `dense` as they begin; `cuts` has the columns of each table's parts."""
        self.run, self.cuts, self.dense = run, cuts, copy.deepcopy(dense)
        self.copies = [
            Copy({name: table.clone() for name, table in tables.items()})
            for _ in range(run.embeddings.groups)
        ]
        chosen = run.optimizer
        self.optimizer = torch.optim.Adam(self.dense.parameters(), chosen.lr, chosen.betas, chosen.eps)

    def step(self, number: int, batch: ClickBatch, copy_of_row: torch.Tensor, log_q_R: torch.Tensor) -> float:
        """Step `number` on the whole batch, whose rows (B,) belong to copies; the loss before it."""
        weights = [
            {name: table.requires_grad_() for name, table in one.tables.items()} for one in self.copies
        ]
        embedded = {
            name: torch.stack([weights[c][name][i] for c, i in zip(copy_of_row, ids_B, strict=True)])
            for name, ids_B in zip(self.run.model.columns, batch.categories_BC.T, strict=True)
        }
        loss = self._loss(self.dense(batch.numbers_BD, embedded), batch, log_q_R)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for place, one in enumerate(self.copies):
                for number_of, (name, table) in enumerate(one.tables.items()):
                    gradient = torch.zeros_like(table) if table.grad is None else table.grad
                    rows = batch.categories_BC[copy_of_row == place, number_of].unique()
                    # Of a copy's own rows the mean, not of all.
                    updated = self._moved(one, name, table.detach(), gradient * len(self.copies), rows)
                    one.tables[name] = updated
            if (number + 1) % self.run.embeddings.sync_every == 0:
                for name in self.run.model.columns:
                    mean = torch.stack([one.tables[name] for one in self.copies]).mean(0)
                    for one in self.copies:
                        one.tables[name] = mean.clone()
        return loss.item()

    def _loss(
        self,
        given: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        batch: ClickBatch,
        log_q_R: torch.Tensor,
    ) -> torch.Tensor:
        if isinstance(given, torch.Tensor):
            return F.binary_cross_entropy(given.sigmoid(), batch.clicked_B.to(given.dtype))
        assert self.run.two_tower is not None
        users, items = given
        ids = batch.categories_BC[:, len(self.run.two_tower.user)].tolist()
        scores = users @ items.T / self.run.two_tower.temperature - log_q_R[ids]
        total = scores.new_zeros(())
        for row, own in enumerate(ids):
            others = [place for place, item in enumerate(ids) if place == row or item != own]
            total = total - scores[row, row] + scores[row, others].logsumexp(0)
        return total / len(ids)

    def _moved(
        self, one: Copy, name: str, table: torch.Tensor, gradient: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        moved = table.clone()
        for columns in self.cuts[name]:
            part, state = slice(*columns), one.state.setdefault((name, columns), {})
            move = _step(self.run.embeddings, state, gradient[:, part], rows)
            moved[rows, part] -= move[rows]
        return moved


def _step(
    chosen: Embeddings, state: dict[str, torch.Tensor], gradient_RC: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Return the update of a part of a table, with `rows` those that the step looks up."""
    if chosen.optimizer == "sgd":
        return chosen.lr * gradient_RC
    if chosen.optimizer == "rowwise_adagrad":
        squares = state.setdefault("squares", gradient_RC.new_zeros(len(gradient_RC), 1))
        squares += gradient_RC.square().mean(1, keepdim=True)
        return chosen.lr * gradient_RC / (squares.sqrt() + 1e-8)
    mean = state.setdefault("mean", torch.zeros_like(gradient_RC))
    square = state.setdefault("square", torch.zeros_like(gradient_RC))
    steps = state.setdefault("steps", gradient_RC.new_zeros(()))
    steps += 1
    mean[rows] = 0.9 * mean[rows] + 0.1 * gradient_RC[rows]
    square[rows] = 0.999 * square[rows] + 0.001 * gradient_RC[rows].square()
    return chosen.lr * (mean / (1 - 0.9**steps)) / ((square / (1 - 0.999**steps)).sqrt() + 1e-8)
