"""Whole documents packed into windows, each of which attends to itself alone.

The documents of a window do not see each other, so documents are packed once. Packing is as tight as best-fit
decreasing (Ding et al., Fewer Truncations Improve Language Modeling, 2024). Each epoch visits the windows in another
shuffle. Window number i of a run is a function of the seed and i alone, as in `streams.py`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchwright.train.data.batch import WindowBatch
from torchwright.train.data.shards import DataError, Shards
from torchwright.train.data.streams import mixed, permuted
from torchwright.train.model.vocabulary import IGNORE

SCANNED = 1 << 24
"""Ids that are looked through at a time for the end token."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces that windows are packed with: documents, or parts of documents longer than a window."""

    shard_P: np.ndarray
    start_P: np.ndarray
    length_P: np.ndarray
    """Places that it takes: one less than its tokens, of which the last is a label alone."""
    cut: int = 0
    """Documents of which the end is left out."""
    dropped: int = 0
    """Documents that are left out, since all that is trained on of them lies behind the window."""
    second_P: np.ndarray | None = None
    """Start of the second of a piece's two documents, for pairs."""

    def documents(self, piece: int) -> Iterator[tuple[int, int]]:
        """(start, places) of each document of a piece."""
        start, length = int(self.start_P[piece]), int(self.length_P[piece])
        if self.second_P is None:
            yield start, length
        else:
            second = int(self.second_P[piece])
            yield start, second - start - 1
            yield second, length - (second - start - 1)


class Packed:
    """An endless walk over windows of whole documents, a source as `Windows`."""

    def __init__(
        self,
        shards: Shards,
        context: int,
        seed: int,
        *,
        end: int | None,
        pairs: bool = False,
        reference_P2: np.ndarray | None = None,
    ) -> None:
        """In shards that do not say where documents begin, one ends with each token `end`.

        Of `pairs` both documents lie in one window, the first one first; `reference_P2` is what `WindowBatch` says of
        them.
        """
        self.shards, self.context, self.seed, self.reference_P2 = shards, context, seed, reference_P2
        self.pieces = cut_pairs(shards, context) if pairs else cut_documents(shards, context, end)
        if not len(self.pieces.length_P):
            raise DataError(
                "no document holds a token to predict",
                found=", ".join(str(path) for path in shards.paths[:5]),
                next="`torchwright data check` shows what is read",
            )
        self._order_P, self._first_W = pack(self.pieces.length_P, context)
        self.count = len(self._first_W) - 1
        """Windows of an epoch."""

    def window(self, number: int) -> int:
        """Which of the windows is visited as number `number`."""
        epoch, place = divmod(number, self.count)
        return permuted(place, self.count, mixed(self.seed, epoch))

    def batch(self, first: int, rows: int) -> WindowBatch:
        """Windows `first` … `first + rows`. Raises `DataError`, naming the shard, for an id that the model lacks."""
        return self.rows([self.window(number) for number in range(first, first + rows)])

    def rows(self, windows: Sequence[int | None]) -> WindowBatch:
        """These windows; None is one without any document."""
        ids_BT, labels_BT, documents_BT = torch.from_numpy(
            np.stack([self.row(window) for window in windows], 1)
        )
        reference_BT = None
        if self.reference_P2 is not None:
            reference_BT = torch.from_numpy(np.stack([self._reference(window) for window in windows]))
        return WindowBatch(
            ids_BT=ids_BT, labels_BT=labels_BT, documents_BT=documents_BT, reference_BT=reference_BT
        )

    def _reference(self, window: int | None) -> np.ndarray:
        """(T,): at each place what the reference says of its document."""
        assert self.reference_P2 is not None
        row = np.zeros(self.context, self.reference_P2.dtype)
        if window is not None:
            held = self.held(window)
            places = [places for piece in held for _, places in self.pieces.documents(piece)]
            row[: sum(places)] = np.repeat(self.reference_P2[held].ravel(), places)
        return row

    def row(self, window: int | None) -> np.ndarray:
        """(3, T): ids, labels and where documents begin; what is left over is a document without labels.

        None is a window without any.
        """
        row = np.zeros((3, self.context), np.int64)
        row[1] = IGNORE
        place = 0
        for piece in () if window is None else self.held(window):
            shard = int(self.pieces.shard_P[piece])
            for start, length in self.pieces.documents(piece):
                ids = self.shards.read(shard, start, length + 1)
                trained = self.shards.trained(shard, start, length + 1)
                here = slice(place, place + length)
                row[0, here] = ids[:-1]
                row[1, here] = np.where(trained[1:], ids[1:], IGNORE)
                row[2, here] = place
                place += length
        row[2, place:] = place
        return row

    def held(self, window: int) -> np.ndarray:
        """The pieces of a window, in their order."""
        return self._order_P[self._first_W[window] : self._first_W[window + 1]]

    def describe(self, first: int, rows: int) -> str:
        """The files and places of a batch, for messages."""
        firsts = [self.held(self.window(number))[0] for number in range(first, first + min(rows, 4))]
        named = ", ".join(
            f"{self.shards.paths[self.pieces.shard_P[piece]].name} at {self.pieces.start_P[piece]:,}"
            for piece in firsts
        )
        which = f"window {first:,}" if rows == 1 else f"windows {first:,} to {first + rows - 1:,}"
        return f"{which} ({named}{', …' if rows > 4 else ''})"


class PackedHeldOut:
    """The windows of documents that every evaluation reads: as many as `tokens` hold."""

    def __init__(self, shards: Shards, context: int, tokens: int, **how: Any) -> None:
        """`how` is as of `Packed`."""
        self._packed = Packed(shards, context, 0, **how)
        self.count = min(tokens // context, self._packed.count)

    def batch(self, first: int, rows: int) -> WindowBatch:
        """Return windows `first` … `first + rows`; those beyond the last are rows without labels."""
        numbers = range(first, first + rows)
        return self._packed.rows(
            [self._packed.window(number) if number < self.count else None for number in numbers]
        )


def cut_documents(shards: Shards, context: int, end: int | None) -> Pieces:
    """The documents of all shards, none longer than a window.

    A longer text becomes several; the end of a longer answer is left out, since it would follow what is not seen.
    """
    found: list[tuple[int, int, int]] = []
    cut = dropped = 0
    for shard, size in enumerate(shards.sizes):
        starts, whole = document_starts(shards, shard, end), shards.answers(shard)
        lengths = np.diff(starts, append=size) - 1
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            if 0 < length <= context:
                found.append((shard, start, length))
                continue
            if length > 0 and not whole and shards.trained(shard, start + 1, length).all():
                found.extend(
                    (shard, start + place, min(context, length - place))
                    for place in range(0, length, context)
                )
            elif length > 0 and shards.trained(shard, start + 1, context).any():
                found.append((shard, start, context))
                cut += 1
            else:
                dropped += length > 0
    shard_P, start_P, length_P = np.array(found, np.int64).reshape(-1, 3).T
    return Pieces(shard_P=shard_P, start_P=start_P, length_P=length_P, cut=cut, dropped=dropped)


def cut_pairs(shards: Shards, context: int) -> Pieces:
    """The pairs of all shards: each document with the one that follows it.

    Raises `DataError` for a shard that holds no pairs, or one that does not fit into a window.
    """
    found: list[np.ndarray] = []
    for shard, size in enumerate(shards.sizes):
        starts = shards.starts(shard)
        if starts is None or len(starts) % 2:
            raise DataError(
                f"{shards.paths[shard]} holds no pairs",
                found="an odd number of documents, or token ids alone",
            )
        lengths_P = (np.diff(starts, append=size) - 1).reshape(-1, 2).sum(1)
        if lengths_P.max() > context:
            raise DataError(
                f"{shards.paths[shard]} holds pairs that are longer than a window of {context:,} tokens",
                found=f"{(lengths_P > context).sum():,} of {len(lengths_P):,}, of up to {lengths_P.max():,} places",
                next="use a larger context, or make the shard again with `torchwright data pack` and this run file",
            )
        found.append(np.stack([np.full(len(lengths_P), shard), starts[::2], lengths_P, starts[1::2]]))
    shard_P, start_P, length_P, second_P = np.concatenate(found, 1)
    return Pieces(shard_P=shard_P, start_P=start_P, length_P=length_P, second_P=second_P)


def document_starts(shards: Shards, shard: int, end: int | None) -> np.ndarray:
    """Return where the documents of a shard begin; in a shard that does not say, each ends with a token `end`."""
    told = shards.starts(shard)
    if told is not None:
        return told

    def ends() -> Iterator[np.ndarray]:
        for place in range(0, shards.sizes[shard], SCANNED):
            yield place + np.flatnonzero(shards.read(shard, place, SCANNED) == end)

    starts = np.concatenate([[0], *(some + 1 for some in ends())]).astype(np.int64)
    return starts[starts < shards.sizes[shard]]


def pack(length_P: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces in the order in which windows hold them, and where each window's begin, one more for the last one's end.

    Best-fit decreasing: the longest first, each into the window that it leaves the least room in.
    """
    room_of: dict[int, list[int]] = {}  # room left → windows
    rooms: list[int] = []  # that any window has, rising
    window_P = np.empty(len(length_P), np.int64)
    count = 0
    order = np.argsort(-length_P, kind="stable")
    for piece, length in zip(order.tolist(), length_P[order].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            window, room, count = count, context, count + 1
        else:
            room = rooms[at]
            window = room_of[room].pop()
            if not room_of[room]:
                del rooms[at], room_of[room]
        window_P[piece] = window
        if left := room - length:
            if left not in room_of:
                insort(rooms, left)
            room_of.setdefault(left, []).append(window)
    order_P = np.argsort(window_P, kind="stable")
    return order_P, np.searchsorted(window_P[order_P], np.arange(count + 1))
