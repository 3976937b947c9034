"""Medians with their intervals, and rounds in which others ran; coverage is in `test_coverage.py`."""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchwright.hardware.measure.clock import Rounds, Waiting, median_interval, paired_speedup

times = st.floats(1e-6, 1e3)


@given(st.lists(times, min_size=2, max_size=60))
def test_interval_holds_the_median(values):
    interval = median_interval(values)
    assert interval.value == statistics.median(values)
    assert interval.low <= interval.value <= interval.high


@given(st.lists(times, min_size=6, max_size=60))
def test_interval_of_six_values_and_more_lies_within_them(values):
    interval = median_interval(values)
    assert min(values) <= interval.low <= interval.high <= max(values)


@given(st.lists(times, min_size=2, max_size=30), st.randoms())
def test_order_does_not_matter(values, shuffler):
    shuffled = values[:]
    shuffler.shuffle(shuffled)
    assert median_interval(shuffled) == median_interval(values)


@pytest.mark.parametrize("n", [6, 7, 9, 15, 25, 40])
def test_ends_lie_between_the_ranks_on_either_side_of_95_per_cent(n):
    interval = median_interval(list(range(1, n + 1)))
    k = int(interval.low)
    assert interval.high == pytest.approx(n + 1 - interval.low)

    def coverage(rank: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(rank)) / 2**n

    assert coverage(k) >= 0.95 > coverage(k + 1)


def test_five_values_have_students_interval_of_the_mean():
    interval = median_interval([1.0, 2.0, 3.0, 4.0, 10.0])
    half = 2.7764451 * statistics.stdev([1, 2, 3, 4, 10]) / math.sqrt(5)
    assert (interval.low, interval.high) == pytest.approx((4 - half, 4 + half))


@pytest.mark.parametrize("values", [[], [1.0]])
def test_too_few_values(values):
    with pytest.raises(ValueError, match=f"{len(values)} values have no interval"):
        median_interval(values)


@pytest.mark.parametrize("outlier", [1e-6, 0.06, 30.0, 1e6])
def test_one_stalled_turn_does_not_discard_a_gain(outlier):
    found = paired_speedup([2.0, 1.98, 2.02, 2.01, 1.99, 2.0, 2.03, 1.97, outlier], [1.0] * 9)
    assert 1.9 < found.low < found.value < found.high < 2.1


def test_speedup_is_the_median_of_paired_ratios():
    # The machine slows down tenfold in the middle: pairs see it together, medians of each alone would not.
    load = [1, 1, 1, 10, 10, 10, 10]
    before, after = [2.0 * x for x in load], [1.0 * x for x in load]
    found = paired_speedup(before, after)
    assert (found.low, found.value, found.high) == pytest.approx((2.0, 2.0, 2.0))


@given(st.lists(st.tuples(times, times), min_size=2, max_size=30))
def test_swapping_the_two_inverts_the_speedup_interval(pairs):
    before, after = zip(*pairs, strict=True)
    forth, back = paired_speedup(before, after), paired_speedup(after, before)
    assert forth.low * back.high == pytest.approx(1)
    assert forth.high * back.low == pytest.approx(1)


def test_unequal_lengths():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_speedup([1.0, 2.0], [1.0])


class TestRounds:
    def test_disturbed_rounds_are_left_out_where_enough_others_are_left(self):
        rounds = Rounds[int](enough=3)
        for row, waited in enumerate([0.0, 0.5, 0.05, 0.9, 0.0]):
            rounds.add(row, waited)
        assert (rounds.counted, rounds.busy) == ([0, 2, 4], False)

    def test_without_quiet_moments_all_rounds_count_and_it_says_so(self):
        rounds = Rounds[int](enough=3)
        for row, waited in enumerate([0.0, 0.5, 0.05, 0.9]):
            rounds.add(row, waited)
        assert (rounds.counted, rounds.busy) == ([0, 1, 2, 3], True)

    def test_a_few_quiet_rounds_are_no_busy_machine(self):
        rounds = Rounds[int](enough=9)
        rounds.add(0, 0.0)
        assert (rounds.counted, rounds.busy) == ([0], False)


class TestWaiting:
    def test_the_thread_that_waited_longest_counts(self):
        earlier, now = Waiting({"1": 1.0, "2": 5.0}), Waiting({"1": 1.5, "2": 5.1, "3": 0.2})
        assert now.since(earlier) == pytest.approx(0.5)

    def test_where_nothing_is_known_nobody_waits(self):
        assert Waiting({}).since(Waiting({})) == 0

    @pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no account")
    def test_the_account_of_this_process_only_grows(self):
        earlier = Waiting.now()
        assert str(os.getpid()) in earlier.seconds
        assert Waiting.now().since(earlier) >= 0
