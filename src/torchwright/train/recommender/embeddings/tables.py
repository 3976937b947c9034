"""The tables of a recommender's embeddings, and lists of ids of different lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch

from torchwright.core.errors import TorchwrightError

Pooling = Literal["sum", "mean", "none"]


class EmbeddingError(TorchwrightError):
    """Tables, ids or a plan that do not fit each other."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of embeddings, and the features that look it up."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: Pooling = "sum"
    """The pooling of a bag of ids: the embeddings' sum or mean, or each embedding by itself."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.dim < 1:
            raise EmbeddingError(
                f"the table '{self.name}' has {self.rows} rows of {self.dim}", allowed="at least one of each"
            )
        if not self.features:
            raise EmbeddingError(f"no feature looks up the table '{self.name}'", next="name its features")


@dataclass(frozen=True)
class Jagged:
    """Bags of ids, one after another: `ids` (I,) and `lengths` (N,), both int64; a bag may be empty."""

    ids: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, bags: Iterable[Sequence[int]]) -> Self:
        """From lists of ids."""
        rows = [list(bag) for bag in bags]
        ids = torch.tensor([id for bag in rows for id in bag], dtype=torch.int64)
        return cls(ids, torch.tensor([len(bag) for bag in rows], dtype=torch.int64))

    def check(self, feature: str, rows: int) -> None:
        """Raise `EmbeddingError` unless the lengths cover the ids and every id is a row of the table."""
        if self.ids.dtype != torch.int64 or self.lengths.dtype != torch.int64:
            raise EmbeddingError(
                f"the ids of '{feature}' are {self.ids.dtype}, their lengths {self.lengths.dtype}",
                allowed="int64",
            )
        if len(self.lengths) and int(self.lengths.min()) < 0:
            raise EmbeddingError(f"a bag of '{feature}' has the length {int(self.lengths.min())}")
        if int(self.lengths.sum()) != len(self.ids):
            raise EmbeddingError(
                f"the bags of '{feature}' hold {int(self.lengths.sum())} ids", found=f"{len(self.ids)} ids"
            )
        if len(self.ids):
            least, most = int(self.ids.min()), int(self.ids.max())
            if least < 0 or most >= rows:
                raise EmbeddingError(
                    f"the feature '{feature}' has the id {least if least < 0 else most}",
                    allowed=f"0 to {rows - 1}",
                )

    def bags(self) -> torch.Tensor:
        """The bag (I,) of each id."""
        return torch.arange(len(self.lengths), device=self.lengths.device).repeat_interleave(self.lengths)


Inputs = Mapping[str, Jagged]
"""Feature → its bags."""


def check_tables(tables: Sequence[Table]) -> None:
    """Raise `EmbeddingError` unless names and features are each used once."""
    for what, names in (
        ("table", [table.name for table in tables]),
        ("feature", [feature for table in tables for feature in table.features]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise EmbeddingError(f"two tables have the {what} '{twice[0]}'", next="name each once")
