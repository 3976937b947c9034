"""The dense parts of recommenders; their tables are not here, but looked up before.

Shapes: B rows, D numbers, E width of an embedding, V vectors that are multiplied with each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.train.recommender.config import Dlrm, RecommenderRun, TwoTower
from torchwright.train.recommender.embeddings import Table

Embedded = Mapping[str, torch.Tensor]
"""Category → the embeddings (B, E) of its rows."""


def tables_of(run: RecommenderRun) -> list[Table]:
    """One for each category."""
    return [
        Table(name=name, rows=rows, dim=run.model.dim, features=(name,))
        for name, rows in run.model.columns.items()
    ]


def build_dense(run: RecommenderRun) -> nn.Module:
    """The run's dense layers, drawn by its seed alike on every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        if run.dlrm is not None:
            return ClickModel(run.dlrm)
        assert run.two_tower is not None
        return Towers(run.two_tower)


class ClickModel(nn.Module):
    """The dense part of DLRM (Naumov et al., 2019).

    Layers over the numbers, products of all pairs of vectors, layers over these and the numbers' vector.
    """

    def __init__(self, config: Dlrm) -> None:
        super().__init__()
        self.bottom = layers([len(config.numbers), *config.bottom, config.dim]) if config.numbers else None
        vectors = len(config.categories) + (self.bottom is not None)
        pairs = vectors * (vectors - 1) // 2
        self.top = layers([pairs + (config.dim if self.bottom else 0), *config.top, 1])
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, offset=1), persistent=False)

    def forward(self, numbers_BD: torch.Tensor, embedded: Embedded) -> torch.Tensor:
        """Logits (B,) of a click."""
        vectors, beside = list(embedded.values()), []
        if self.bottom is not None:
            x_BE = F.relu(self.bottom(numbers_BD))
            vectors, beside = [x_BE, *vectors], [x_BE]
        all_BVE = torch.stack(vectors, dim=1)
        products_BVV = all_BVE @ all_BVE.transpose(1, 2)
        first, second = self.get_buffer("pairs")
        return self.top(torch.cat([*beside, products_BVV[:, first, second]], dim=1))[:, 0]


class Towers(nn.Module):
    """Two towers (Covington et al., 2016; Yi et al., 2019): a vector of length 1 for each user, and for each item."""

    def __init__(self, config: TwoTower) -> None:
        super().__init__()
        self.columns = {"user": list(config.user), "item": list(config.item)}
        self.towers = nn.ModuleDict(
            {
                name: layers([len(columns) * config.dim, *config.hidden, config.dim])
                for name, columns in self.columns.items()
            }
        )

    def forward(self, numbers_BD: torch.Tensor, embedded: Embedded) -> tuple[torch.Tensor, torch.Tensor]:
        """Users' and items' vectors (B, E), row by row."""
        return self.vectors("user", embedded), self.vectors("item", embedded)

    def vectors(self, tower: str, embedded: Embedded) -> torch.Tensor:
        """One tower's vectors (B, E)."""
        inputs = torch.cat([embedded[name] for name in self.columns[tower]], dim=1)
        return F.normalize(self.towers[tower](inputs), dim=1)


def layers(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers from width to width, with ReLU between them."""
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.ReLU()] if parts else []
        parts.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*parts)
