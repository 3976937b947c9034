"""Paired timing: candidates run in turn (A B A B …) and are compared by the median of the paired ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from torchwright.facts import Interval


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median with a distribution-free confidence interval from order statistics.

    The interval [x_(k), x_(n+1-k)] covers the true median with probability 1 - 2 P(Bin(n, 1/2) < k), whatever the
    distribution (Conover, Practical Nonparametric Statistics, 3.2). Below six values no interval reaches 95%, and
    the extremes are given.

    Raises `ValueError` for no values.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        raise ValueError("no values")
    k, tail = 0, 0.0
    while k < n // 2:
        tail += math.comb(n, k) / 2**n
        if 2 * tail > 1 - confidence:
            break
        k += 1
    low = max(k - 1, 0)
    return Interval(value=statistics.median(ordered), low=ordered[low], high=ordered[n - 1 - low])


def paired_speedup(before: Sequence[float], after: Sequence[float]) -> Interval:
    """How many times faster `after` is than `before`; the two were timed in turn, so each pair saw one machine.

    Raises `ValueError` when the two differ in length.
    """
    return median_interval([a / b for a, b in zip(before, after, strict=True)])
