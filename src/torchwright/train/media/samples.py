"""Samples in the order of training: read when their step comes, with broken ones reported and left out.

Which sample comes as number i of a run is a function of the seed and i alone, as with windows of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchwright.core.errors import WorkloadError
from torchwright.train.data.shards import DataError
from torchwright.train.data.streams import mixed, permuted
from torchwright.train.media.listing import Item


@dataclass(frozen=True, kw_only=True)
class MediaBatch:
    """The batch that one process computes at once."""

    inputs: dict[str, Any]
    """The arguments of the model; tensors (B, …) among them."""
    labels: torch.Tensor
    """(B,) classes or (B, T) tokens; `IGNORE` where nothing is learnt, as of what cannot be read."""


class Task(Protocol):
    """Builds a batch of files for a kind of run."""

    def prepare(self, item: Item, draw: int | None) -> Any:
        """A file's sample; `draw` seeds what is random in it, None makes nothing so. Raises `WorkloadError`."""
        ...

    def collate(self, samples: Sequence[Any | None]) -> MediaBatch:
        """None stands for a sample that cannot be read."""
        ...


class Samples:
    """Items in an endless order, each epoch in a shuffle of its own; without a seed once, as they are."""

    def __init__(self, items: Sequence[Item], task: Task, seed: int | None, *, strict: bool) -> None:
        self.items, self.task, self.seed, self.strict = items, task, seed, strict
        self.broken: dict[str, str] = {}
        """File → why it cannot be read, of those that were met."""

    def __len__(self) -> int:
        return len(self.items)

    def item(self, number: int) -> Item | None:
        """Which comes as `number`; None behind the end."""
        if self.seed is None:
            return self.items[number] if number < len(self.items) else None
        epoch, place = divmod(number, len(self.items))
        return self.items[permuted(place, len(self.items), mixed(self.seed, epoch))]

    def batch(self, first: int, count: int) -> MediaBatch:
        """Samples `first` … `first + count`. Raises `DataError` for a broken one, if `strict`."""
        return self.task.collate([self._sample(number) for number in range(first, first + count)])

    def describe(self, first: int, count: int) -> str:
        """The files of a batch, for messages."""
        found = [self.item(number) for number in range(first, first + min(count, 4))]
        named = ", ".join(str(item.path) for item in found if item is not None)
        which = f"sample {first:,}" if count == 1 else f"samples {first:,} to {first + count - 1:,}"
        return f"{which} ({named}{', …' if count > 4 else ''})"

    def _sample(self, number: int) -> Any | None:
        item = self.item(number)
        if item is None:
            return None
        try:
            return self.task.prepare(item, None if self.seed is None else mixed(self.seed + 1, number))
        except WorkloadError as error:
            if self.strict:
                raise DataError(
                    f"{item.path} cannot be read",
                    found=str(error),
                    next="mend it or take it out, or set data.strict = false",
                ) from error
            self.broken[str(item.path)] = str(error)
            return None
