"""What a step reads: windows of the token stream in an order that a seed and a number decide.

Nothing is drawn or kept between steps: window number i of a run is a function of the seed and i alone, so that a
position is one number, a run may be continued at any step, and each process reads its own rows without the others'.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torchwright.train.data_shards import DataError, Shards

ROUNDS = 4
WORD = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one window lies."""

    shard: int
    start: int


class Windows:
    """An endless walk over all windows of `context` tokens: each epoch visits each once, in an order of its own.

    A shard is cut from an offset that changes with the epoch, so that a token is not always the same distance from the
    beginning of its window. `begin`, if given, leads every window whose number is a multiple of `begin_every`: the
    model learns that it may stand before any piece of text, and that it may be missing.
    """

    def __init__(
        self, shards: Shards, context: int, seed: int, *, begin: int | None = None, begin_every: int = 0
    ) -> None:
        """Raises `DataError` where no shard holds a single window."""
        self.shards, self.context, self.seed = shards, context, seed
        self.begin, self.begin_every = begin, begin_every
        # One token more than the inputs: the label of the last. One window less, as room for the offset.
        sizes = np.array([len(array) - 1 for array in shards.arrays], dtype=np.int64)
        self._whole = np.maximum(np.where(sizes >= context, 1, 0), sizes // context - 1)
        self._slack = np.maximum(0, np.minimum(context - 1, sizes - self._whole * context))
        self._ends = np.cumsum(self._whole)
        self.per_epoch = int(self._ends[-1])
        if not self.per_epoch:
            raise DataError(
                f"no token shard is longer than one window of {context} tokens",
                found=f"{len(shards):,} tokens in {len(shards.paths)} files",
                next="use a shorter `context`, or join the files",
            )

    def place(self, number: int) -> Place:
        """Where window `number` lies."""
        epoch, within = divmod(number, self.per_epoch)
        chosen = permuted(within, self.per_epoch, _hash(self.seed, epoch))
        shard = int(np.searchsorted(self._ends, chosen, side="right"))
        first = chosen - int(self._ends[shard] - self._whole[shard])
        offset = _hash(self.seed + 1, epoch) % (int(self._slack[shard]) + 1)
        return Place(shard=shard, start=offset + first * self.context)

    def batch(self, first: int, rows: int) -> torch.Tensor:
        """Windows `first` … `first + rows`, int64 (B, T + 1): the inputs and, one further, their labels.

        Raises `DataError`, naming the shard, for an id that the model does not have.
        """
        out = np.empty((rows, self.context + 1), dtype=np.int64)
        for row in range(rows):
            place = self.place(first + row)
            out[row] = self.shards.read(place.shard, place.start, self.context + 1)
            if self.begin is not None and self.begin_every and (first + row) % self.begin_every == 0:
                out[row, 1:] = out[row, :-1].copy()
                out[row, 0] = self.begin
        return torch.from_numpy(out)

    def describe(self, first: int, rows: int) -> str:
        """The files and places of a batch, for messages."""
        places = [self.place(number) for number in range(first, first + min(rows, 4))]
        named = ", ".join(f"{self.shards.paths[place.shard].name} at {place.start:,}" for place in places)
        return f"windows {first:,} to {first + rows - 1:,} ({named}{', …' if rows > 4 else ''})"


def permuted(place: int, count: int, key: int) -> int:
    """Where a shuffle of `count` numbers, chosen by `key`, puts `place`.

    A Feistel network over the next power of four, walked until it falls inside (Black and Rogaway, 2002): a permutation
    that takes no memory, however many windows there are.
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (_hash(key, right * ROUNDS + turn) & mask)
        place = left << half | right
        if place < count:
            return place


def _hash(key: int, value: int) -> int:
    """64 well-mixed bits of two numbers (the finalizer of splitmix64)."""
    bits = (key * 0x9E3779B97F4A7C15 + value + 1) & WORD
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & WORD
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & WORD
    return bits ^ bits >> 31
