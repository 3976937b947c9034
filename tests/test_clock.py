"""Medians with their intervals: from order statistics, checked by counting and by simulation."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchwright.measure.clock import median_interval, paired_speedup

times = st.floats(1e-6, 1e3)


@given(st.lists(times, min_size=1, max_size=60))
def test_interval_holds_the_median_and_is_made_of_values(values):
    interval = median_interval(values)
    assert interval.value == statistics.median(values)
    assert interval.low <= interval.value <= interval.high
    assert {interval.low, interval.high} <= set(values)


@given(st.lists(times, min_size=1, max_size=30), st.randoms())
def test_order_does_not_matter(values, shuffler):
    shuffled = values[:]
    shuffler.shuffle(shuffled)
    assert median_interval(shuffled) == median_interval(values)


@given(st.lists(times, min_size=6, max_size=40))
def test_more_confidence_is_no_narrower(values):
    narrow, wide = median_interval(values, 0.5), median_interval(values, 0.99)
    assert wide.low <= narrow.low <= narrow.high <= wide.high


@pytest.mark.parametrize("n", [6, 7, 9, 15, 25, 40])
def test_ranks_are_the_tightest_with_95_per_cent(n):
    interval = median_interval(list(range(1, n + 1)))
    k = int(interval.low)
    assert interval.high == n + 1 - k

    def coverage(rank: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(rank)) / 2**n

    assert coverage(k) >= 0.95 > coverage(k + 1)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_values_give_their_extremes(n):
    interval = median_interval([float(i) for i in range(n)])
    assert (interval.low, interval.high) == (0.0, n - 1.0)


def test_interval_covers_the_true_median_of_a_skewed_distribution():
    # Exact coverage for n = 15 is 96.5%; the standard error of 2,000 draws is 0.4%.
    draws = random.Random(0)
    covered = 0
    for _ in range(2000):
        interval = median_interval([draws.lognormvariate(0, 1) for _ in range(15)])
        covered += interval.low <= 1.0 <= interval.high
    assert 0.95 < covered / 2000 < 0.98


def test_no_values():
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


def test_speedup_is_the_median_of_paired_ratios():
    # The machine slows down tenfold in the middle: pairs see it together, medians of each alone would not.
    load = [1, 1, 1, 10, 10, 10, 10]
    before, after = [2.0 * x for x in load], [1.0 * x for x in load]
    assert paired_speedup(before, after).value == 2.0
    assert paired_speedup(before, after).low == paired_speedup(before, after).high == 2.0


@given(st.lists(st.tuples(times, times), min_size=1, max_size=30))
def test_swapping_the_two_inverts_the_speedup_interval(pairs):
    before, after = zip(*pairs, strict=True)
    forth, back = paired_speedup(before, after), paired_speedup(after, before)
    assert forth.low * back.high == pytest.approx(1)
    assert forth.high * back.low == pytest.approx(1)


def test_unequal_lengths():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_speedup([1.0, 2.0], [1.0])
