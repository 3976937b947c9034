"""Seconds of a forward call by its rows, as measured at the start, and how many proposals are worth theirs."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from torchwright.models.decoder.cache import PAGE, PagedCache
from torchwright.models.decoder.paged_model import PagedModel

MEASURED_ROWS = (1, 2, 4, 8, 16)
"""Rows whose cost is measured when the engine starts; steps of decoding sequences have few."""
TRIALS, LONG_S = 3, 0.1
"""Calls of which the fastest counts, because a busy machine lets some wait; one alone where it takes so long that a
wait hardly changes it, and three would delay the start by seconds."""


@dataclass(frozen=True)
class RowCosts:
    """Seconds of a forward call by its rows, as measured for a few numbers of rows."""

    rows: Sequence[int]
    """Ascending, from 1."""
    seconds: Sequence[float]

    @classmethod
    def rising(cls, rows: Sequence[int], seconds: Sequence[float]) -> RowCosts:
        """Take measured seconds, of which none is more than those of more rows: only noise says that it is."""
        least = accumulate(reversed(seconds), min)
        return cls(rows, list(least)[::-1])

    @classmethod
    def measured(cls, call: Callable[[int], None], most: int, clock: Callable[[], float]) -> RowCosts:
        """Time calls of up to `most` rows; one before each number's trials warms up."""
        rows = [count for count in MEASURED_ROWS if count <= most]
        return cls.rising(rows, [_fastest(call, count, clock) for count in rows])

    def __call__(self, rows: float) -> float:
        """Return the seconds of a call, on the line through the two measured numbers of rows next to it."""
        if len(self.rows) == 1:
            return self.seconds[0] * rows / self.rows[0]
        right = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        left = right - 1
        slope = (self.seconds[right] - self.seconds[left]) / (self.rows[right] - self.rows[left])
        return max(1e-9, self.seconds[left] + slope * (rows - self.rows[left]))

    def worth(self, reaches: Sequence[Sequence[float]], decoding: int, room: int) -> list[int]:
        """Return how many proposals of each chain a step verifies, at most `room`.

        As many as give the most tokens per second. `reaches` has, by chain, the probability that each proposal and all
        before it are accepted; `decoding` sequences have a row in any case. The surest proposals come first.
        None of a chain is surer than the one before it, so that a chain's come in their order.
        """
        values = sorted(
            (-reach, depth, place) for place, chain in enumerate(reaches) for depth, reach in enumerate(chain)
        )
        tokens = float(decoding)
        best, taken = tokens / self(max(1, decoding)), 0
        for count, (value, _, _) in enumerate(values[: max(0, room)], 1):
            tokens -= value
            rate = tokens / self(decoding + count)
            if rate > best:
                best, taken = rate, count
        counts = [0] * len(reaches)
        for _, _, place in values[:taken]:
            counts[place] += 1
        return counts


def _fastest(call: Callable[[int], None], rows: int, clock: Callable[[], float]) -> float:
    call(rows)
    fastest = float("inf")
    for _ in range(TRIALS):
        begun = clock()
        call(rows)
        fastest = min(fastest, clock() - begun)
        if fastest > LONG_S:
            break
    return fastest


@torch.inference_mode()
def measure_rows(
    decoder: PagedModel, cache: PagedCache, clock: Callable[[], float] = time.perf_counter
) -> RowCosts:
    """Time a decoder's calls by rows over an empty cache, each row's likeliest token found as a step does."""

    def decode(rows: int) -> None:
        sequence = cache.sequence(rows)
        try:
            batch = cache.append([(sequence, [0] * rows)])
            # A proposal is verified by the logits of the row in front.
            decoder.answer(batch, cache, torch.arange(rows, device=batch.ids_T.device)).best()
        finally:
            cache.free(sequence)

    return RowCosts.measured(decode, cache.pool.free * PAGE, clock)
