"""Hold out a part of the training data for validation.

The documents that may be held out are drawn when a shard is made, and written last: what is trained on and what is held
out are then two parts of one file, and nothing is copied.
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

Unit = TypeVar("Unit")


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


def divide(shards: Shards, share: float, *, pairs: bool) -> tuple[Shards, Shards | None]:
    """Return what is trained on and what is held out: `share` of each shard, `MOST` rows together; None for nothing.

    `pairs` keeps both documents of a pair together.
    """
    most = max(1, MOST // len(shards.paths))
    cuts = [_cut(shards, shard, share, most, 2 if pairs else 1) for shard in range(len(shards.paths))]
    if cuts == shards.sizes:
        return shards, None
    parts = zip(cuts, shards.sizes, strict=True)
    return shards.part([range(cut) for cut in cuts]), shards.part([range(cut, size) for cut, size in parts])


def _cut(shards: Shards, shard: int, share: float, most: int, together: int) -> int:
    """Return the place at which what is held out of a shard begins."""
    size, starts = shards.sizes[shard], shards.starts(shard)
    if starts is None:
        held = min(int(share * size), MOST_TOKENS)
        return size - held if held > 1 else size  # a single token has none to predict
    told = read_metadata(shards.paths[shard]).get("report")
    drawn = json.loads(told).get("drawn") if told else None
    # A file that was packed elsewhere does not say which documents belong to a row; its last ones are held out.
    lengths = drawn["documents"] if drawn else [together] * min(most, len(starts) // together)
    rows = drawn["rows"] if drawn else len(starts) // together
    count = min(most, int(share * rows), len(lengths), max(0, rows - 1))
    documents = sum(lengths[len(lengths) - count :])
    return int(starts[-documents]) if documents else size
