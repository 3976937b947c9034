"""Hold out a part of the training data for validation.

The documents that may be held out are drawn when a shard is made, and written last: what is trained on and what is held
out are then two parts of one file, and nothing is copied. Pictures and sounds are files of their own, and are drawn by
`drawing_order`.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from typing import TypeVar

from torchwright.train.data.shards import Shards, read_metadata
from torchwright.train.data.streams import mixed

MOST = 512
"""Rows that are held out at the most; more of them would cost time and say little more."""
MOST_TOKENS = 1 << 16
"""The same for files that hold no documents: what an evaluation reads by default."""

LEAST_TOKENS = 256
"""Tokens that are cut off the end of a few long documents at the least: the loss of fewer is mostly noise."""

Unit = TypeVar("Unit")


def held_rows(rows: int, share: float, most: int = MOST) -> int:
    """Return how many of `rows` are held out; one at least is trained on."""
    return max(0, min(most, int(share * rows), rows - 1))


def drawing_order(rows: int, seed: int) -> list[int]:
    """Return the numbers of the rows, the first to be held out first."""
    return sorted(range(rows), key=lambda number: (mixed(seed, number), number))


def drawn_last(units: Iterable[Unit], seed: int) -> Iterator[tuple[Unit, bool]]:
    """Yield units, up to `MOST` that the seed draws last and marked, the first drawn at the very end.

    Any number of units streams through; as many as are drawn are in memory.
    """
    heap: list[tuple[int, int, Unit]] = []
    for number, unit in enumerate(units):
        heapq.heappush(heap, (-mixed(seed, number), number, unit))
        if len(heap) > MOST:
            yield heapq.heappop(heap)[2], False
    for _, _, unit in sorted(heap, key=lambda drawn: drawn[:2]):
        yield unit, True


def divide(shards: Shards, share: float, *, pairs: bool, whole: bool = True) -> tuple[Shards, Shards | None]:
    """Return what is trained on and what is held out: `share` of each shard, `MOST` rows together; None for nothing.

    `pairs` keeps both documents of a pair together. Unless documents stay `whole`, a file with too few of them to hold
    one out ends earlier: its last tokens are held out.
    """
    most = max(1, MOST // len(shards.paths))
    together = 2 if pairs else 1
    cuts = [_cut(shards, shard, share, most, together, whole=whole) for shard in range(len(shards.paths))]
    if cuts == shards.sizes:
        return shards, None
    parts = zip(cuts, shards.sizes, strict=True)
    return shards.part([range(cut) for cut in cuts]), shards.part([range(cut, size) for cut, size in parts])


def _cut(shards: Shards, shard: int, share: float, most: int, together: int, *, whole: bool) -> int:
    """Return the place at which what is held out of a shard begins."""
    size, starts = shards.sizes[shard], shards.starts(shard)
    by_tokens = min(int(share * size), MOST_TOKENS)
    if starts is None:
        return size - by_tokens if by_tokens > 1 else size  # a single token has none to predict
    told = read_metadata(shards.paths[shard]).get("report")
    drawn = json.loads(told).get("drawn") if told else None
    # A file that was packed elsewhere does not say which documents belong to a row; its last ones are held out.
    lengths = drawn["documents"] if drawn else [together] * min(most, len(starts) // together)
    rows = drawn["rows"] if drawn else len(starts) // together
    count = min(held_rows(rows, share, most), len(lengths))
    documents = sum(lengths[len(lengths) - count :])
    if documents:
        return int(starts[-documents])
    return size if whole or by_tokens < LEAST_TOKENS else size - by_tokens
