"""Windows of an endless stream of tokens, in an order that a seed and a number decide.

The stream is all files one after the other, epoch after epoch. Each epoch has an order of files and a first place of
its own. Cut into windows without a gap, it holds every token of every file once an epoch; a window
may run from one file into the next, and one into the next epoch. The windows of an epoch are visited in a shuffle.

Nothing is drawn or kept between steps: window number i of a run is a function of the seed and i alone. So a position is
one number, a run may be continued at any step, and each process reads its own rows without the others'.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from torchwright.train.data.batch import WindowBatch, of_windows
from torchwright.train.data.shards import DataError, Shards
from torchwright.train.model.vocabulary import IGNORE

ORDER = "packed"
"""Version of the order of windows; kept with a checkpoint, whose position means nothing in another order."""
ROUNDS = 4
WORD = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class ShardPiece:
    """A run of tokens of one shard."""

    shard: int
    start: int
    length: int


class Stream:
    """All tokens of the shards, epoch after epoch without an end."""

    def __init__(self, shards: Shards, seed: int) -> None:
        self.shards, self.seed = shards, seed
        self._arranged = functools.lru_cache(maxsize=2)(self._arrange)

    def read(self, start: int, length: int) -> np.ndarray:
        """`length` ids from place `start` on, int64. Raises `DataError`, naming the shard, for an id out of range."""
        pieces = self.pieces(start, length)
        return np.concatenate([self.shards.read(piece.shard, piece.start, piece.length) for piece in pieces])

    def pieces(self, start: int, length: int) -> Iterator[ShardPiece]:
        """Yield where `length` tokens from place `start` on lie, in their order."""
        while length:
            epoch, within = divmod(start, self.shards.tokens)
            files, ends, turn = self._arranged(epoch)
            place = (within + turn) % self.shards.tokens
            at = int(np.searchsorted(ends, place, side="right"))
            # Until the file, the epoch or what was asked for ends.
            count = min(int(ends[at]) - place, self.shards.tokens - within, length)
            size = self.shards.sizes[files[at]]
            yield ShardPiece(shard=files[at], start=size - (int(ends[at]) - place), length=count)
            start, length = start + count, length - count

    def _arrange(self, epoch: int) -> tuple[list[int], np.ndarray, int]:
        """The epoch's files in their order, where each ends, and the place in them at which the epoch begins.

        Without that place, files that are whole windows long would be cut at the same places in every epoch.
        """
        key = mixed(self.seed + 1, epoch)
        files = sorted(range(len(self.shards.sizes)), key=lambda file: mixed(key, file))
        ends = np.cumsum([self.shards.sizes[file] for file in files], dtype=np.int64)
        return files, ends, mixed(self.seed + 2, epoch) % self.shards.tokens


class Windows:
    """An endless walk over all windows of `context` tokens of a stream; those of an epoch are visited in a shuffle.

    `begin` is the first token of every window whose place in the stream is a multiple of `begin_every`. Such a window
    holds one token of the stream less. The model learns that the token may precede any text, and may be missing.
    """

    def __init__(
        self, shards: Shards, context: int, seed: int, *, begin: int | None = None, begin_every: int = 0
    ) -> None:
        self.stream, self.context, self.seed = Stream(shards, seed), context, seed
        self._lead = np.array([] if begin is None else [begin], dtype=np.int64)
        self.begin_every = begin_every * len(self._lead)

    def window(self, number: int) -> int:
        """Which of the stream's windows is visited as number `number`."""
        epoch = self.start(number) // self.stream.shards.tokens
        first = self.first_of_epoch(epoch)
        count = self.first_of_epoch(epoch + 1) - first
        return first + permuted(number - first, count, mixed(self.seed, epoch))

    def start(self, window: int) -> int:
        """The place in the stream at which a window begins."""
        led = -(-window // self.begin_every) if self.begin_every else 0
        return window * self.context - led

    def first_of_epoch(self, epoch: int) -> int:
        """The first window that begins in an epoch; it is also the number of windows visited before the epoch."""
        token = epoch * self.stream.shards.tokens
        if not self.begin_every:
            return -(-token // self.context)
        # Of `begin_every` windows the first holds one token less.
        turn, rest = divmod(token, self.begin_every * self.context - 1)
        return turn * self.begin_every + (-(-(rest + 1) // self.context) if rest else 0)

    def batch(self, first: int, rows: int) -> WindowBatch:
        """Windows `first` … `first + rows`. Raises `DataError`, naming the shard, for an id that the model lacks."""
        return _batch([self._row(number) for number in range(first, first + rows)])

    def _row(self, number: int) -> np.ndarray:
        window = self.window(number)
        lead = self._lead if self.begin_every and window % self.begin_every == 0 else self._lead[:0]
        return np.concatenate([lead, self.stream.read(self.start(window), self.context + 1 - len(lead))])

    def describe(self, first: int, rows: int) -> str:
        """The files and places of a batch, for messages."""
        starts = [self.start(self.window(number)) for number in range(first, first + min(rows, 4))]
        pieces = [next(self.stream.pieces(start, 1)) for start in starts]
        paths = self.stream.shards.paths
        named = ", ".join(f"{paths[piece.shard].name} at {piece.start:,}" for piece in pieces)
        which = f"window {first:,}" if rows == 1 else f"windows {first:,} to {first + rows - 1:,}"
        return f"{which} ({named}{', …' if rows > 4 else ''})"


class HeldOut:
    """The windows that every evaluation reads: as many as `tokens` hold, spread over the held-out files.

    Together they hold no token twice. With `begin` each is led by it, as a text is.
    """

    def __init__(self, shards: Shards, context: int, tokens: int, *, begin: int | None = None) -> None:
        """Raises `DataError` if the shards have no token to predict."""
        self._stream, self.context, self._lead = Stream(shards, 0), context, [] if begin is None else [begin]
        self._all = -(-(shards.tokens - 1 + len(self._lead)) // context)
        if not self._all:
            raise DataError(
                "the held-out files hold a single token, and none to predict",
                found=", ".join(str(path) for path in shards.paths),
                next="give more of them in data.validation",
            )
        self.count = min(tokens // context, self._all)

    def batch(self, first: int, rows: int) -> WindowBatch:
        """Return windows `first` … `first + rows`; labels beyond the last token or window are `IGNORE`."""
        return _batch([self._row(number) for number in range(first, first + rows)])

    def _row(self, number: int) -> np.ndarray:
        row = np.full(self.context + 1, IGNORE, dtype=np.int64)
        if number < self.count:
            start = permuted(number, self._all, 0) * self.context
            length = min(len(row) - len(self._lead), self._stream.shards.tokens - start)
            ids = [*self._lead, *self._stream.read(start, length)]
            row[: len(ids)] = ids
        return row


def _batch(rows: list[np.ndarray]) -> WindowBatch:
    return of_windows(torch.from_numpy(np.stack(rows)))


def permuted(place: int, count: int, key: int) -> int:
    """Return the place of `place` in a shuffle of `count` numbers, chosen by `key`.

    A Feistel network over the next power of four, walked until it falls inside (Black and Rogaway, 2002): a permutation
    that takes no memory, however many windows there are.
    """
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (mixed(key, right * ROUNDS + turn) & mask)
        place = left << half | right
        if place < count:
            return place


def mixed(key: int, value: int) -> int:
    """64 well-mixed bits of two numbers (the finalizer of splitmix64)."""
    bits = (key * 0x9E3779B97F4A7C15 + value + 1) & WORD
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & WORD
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & WORD
    return bits ^ bits >> 31
