"""Several sources in fixed shares: which source gives window number i is known without looking at those before it.

Of every `ROUND` windows each source gives a fixed number, its weight rounded to that, spread evenly among the others'.
So shares hold over any stretch of a run to about a window, and each source is walked as if it were alone: its windows
in its own order, each of its tokens once in each of its own epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from torchwright.train.data.batch import WindowBatch
from torchwright.train.data.shards import DataError

ROUND = 1000


class Walk(Protocol):
    """An endless walk over windows."""

    def batch(self, first: int, rows: int) -> WindowBatch: ...

    def describe(self, first: int, rows: int) -> str: ...


class Mixture:
    """Windows of several walks, a source as they are."""

    def __init__(self, walks: Mapping[str, Walk], weights: Mapping[str, float]) -> None:
        """Raises `DataError` for a weight that is less than one window of `ROUND`."""
        self.walks = walks
        self._names, self._walks = list(walks), list(walks.values())
        self.shares = shares([weights[name] for name in self._names], self._names)
        self._turn = spread(self.shares)

    def place(self, number: int) -> tuple[int, int]:
        """(source, which of its windows) of window `number`."""
        turn, within = divmod(number, ROUND)
        source, before = self._turn[within]
        return source, turn * self.shares[source] + before

    def batch(self, first: int, rows: int) -> WindowBatch:
        """Windows `first` … `first + rows`."""
        parts = []
        for number in range(first, first + rows):
            source, window = self.place(number)
            parts.append(self._walks[source].batch(window, 1))
        documents = [part.documents_BT for part in parts if part.documents_BT is not None]
        references = [part.reference_BT for part in parts if part.reference_BT is not None]
        return WindowBatch(
            ids_BT=torch.cat([part.ids_BT for part in parts]),
            labels_BT=torch.cat([part.labels_BT for part in parts]),
            documents_BT=torch.cat(documents) if documents else None,
            reference_BT=torch.cat(references) if references else None,
        )

    def describe(self, first: int, rows: int) -> str:
        """The sources, files and places of a batch, for messages."""
        told = []
        for number in range(first, first + min(rows, 4)):
            source, window = self.place(number)
            told.append(f"{self._names[source]}: {self._walks[source].describe(window, 1)}")
        return f"windows {first:,} to {first + rows - 1:,} ({'; '.join(told)}{'; …' if rows > 4 else ''})"


def shares(weights: Sequence[float], names: Sequence[str]) -> list[int]:
    """Windows of each source in a round, by largest remainders."""
    exact = [ROUND * weight / sum(weights) for weight in weights]
    found = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda source: (found[source] - exact[source], source))
    for source in by_rest[: ROUND - sum(found)]:
        found[source] += 1
    for share, name in zip(found, names, strict=True):
        if not share:
            raise DataError(
                f"the source '{name}' has less than one window of {ROUND:,}",
                next="give it more weight, or leave it out",
            )
    return found


def spread(shares: Sequence[int]) -> list[tuple[int, int]]:
    """(source, how many of its windows came before in the round) for each window of a round."""
    due = [
        ((turn + 0.5) / share, source, turn) for source, share in enumerate(shares) for turn in range(share)
    ]
    return [(source, turn) for _, source, turn in sorted(due)]
