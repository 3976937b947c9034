"""The choice of a thread count, from times and loads that a test gives."""

from __future__ import annotations

import pytest
import torch

from torchwright.core.cpu_load import Load
from torchwright.hardware.measure.threads import (
    ThreadChoice,
    calibrate,
    choose_threads,
    counts,
    disturbance,
    fastest,
    mean_seconds,
    small_training_step,
)

QUIET = Load(running=0.1, cores=2)
BUSY = Load(running=24, cores=2)
LIMITED = Load(running=0, cores=2, quota=0.5)


def unasked(count: int) -> float:
    raise AssertionError(f"{count} threads were timed on a machine where nothing speaks against them")


def test_a_quiet_machine_is_not_calibrated() -> None:
    assert choose_threads(QUIET, 2, unasked) is None
    assert choose_threads(Load(running=0, cores=4, quota=3.5), 2, unasked) is None, "the quota leaves two"
    assert choose_threads(BUSY, 1, unasked) is None, "there is nothing to choose"


@pytest.mark.parametrize(
    ("load", "reason"),
    [(BUSY, "machine busy (load 24 on 2 cores)"), (LIMITED, "CPU quota of 0.5 cores")],
)
def test_threads_that_wait_for_each_other_are_not_taken(load: Load, reason: str) -> None:
    found = choose_threads(load, 2, {1: 0.008, 2: 0.064}.__getitem__)
    assert found == ThreadChoice(threads=1, most=2, reason=reason)
    assert str(found) == f"1 of 2 threads: {reason}"
    assert disturbance(load, 2) == reason


def test_no_more_threads_are_tried_than_a_quota_grants() -> None:
    tried: list[int] = []

    def run(threads: int) -> float:
        tried.append(threads)
        return 1 / threads

    found = choose_threads(Load(running=0, cores=48, quota=7.65), 48, run)
    assert found is not None
    assert (found.threads, set(tried)) == (7, {1, 2, 4, 7})
    assert str(choose_threads(LIMITED, 2, unasked)) == "1 of 2 threads: CPU quota of 0.5 cores"


def test_a_busy_machine_keeps_the_threads_that_pay() -> None:
    found = choose_threads(Load(running=2, cores=4), 4, {1: 4.0, 2: 2.1, 4: 1.3}.__getitem__)
    assert found is not None
    assert found.threads == 4


def test_counts_are_powers_of_two_and_the_most() -> None:
    assert [counts(most) for most in (2, 3, 4, 6, 8)] == [
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]


def test_the_smallest_count_wins_unless_more_are_clearly_faster() -> None:
    assert fastest({1: 1.1, 2: 1.0, 4: 3.0}) == 1
    assert fastest({1: 2.0, 2: 1.0, 4: 0.9}) == 2


def test_counts_take_turns_and_their_rounds_are_averaged() -> None:
    times = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    asked: list[int] = []

    def run(count: int) -> float:
        asked.append(count)
        return next(times)

    assert calibrate([1, 2], run) == {1: 3.0, 2: 4.0}
    assert asked == [1, 2, 1, 2, 1, 2]


def test_a_slow_model_is_called_once_with_each_count() -> None:
    now = iter([0.0, 40.0])
    assert calibrate([1, 2], {1: 15.0, 2: 25.0}.__getitem__, lambda: next(now)) == {1: 15.0, 2: 25.0}


def test_calls_are_timed_on_their_threads_and_the_number_is_restored() -> None:
    before, seen = torch.get_num_threads(), []
    assert mean_seconds(lambda: seen.append(torch.get_num_threads()), before + 1, window=0.0) > 0
    assert seen == [before + 1] * 2, "one call to warm up, one that counts"
    with pytest.raises(ZeroDivisionError):
        mean_seconds(lambda: 1 / 0, before + 1)
    assert torch.get_num_threads() == before


def test_the_small_step_computes_gradients_and_keeps_none() -> None:
    step = small_training_step()
    assert step() is None
    assert step() is None
