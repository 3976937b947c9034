"""The time that `--dry-run` says: with the waits of workers, and the start of the next run."""

from __future__ import annotations

import pytest

from torchwright.map.pace import Pace, estimated


class Run:
    """A run whose parts of ten rows and 1,000 bytes end at given times."""

    def __init__(self, workers: int) -> None:
        self.now = 100.0
        self.pace = Pace(workers, lambda: self.now)

    def ends(self, *times: float, computed: float = 2.0) -> None:
        for at in times:
            self.pace.begin()
            self.now = 100.0 + at
            self.pace.take(rows=10, size=1000, computed_seconds=computed)


def test_a_worker_waits_between_its_parts_and_is_slower_at_first() -> None:
    """The start takes 5 s, the first part 4 s, and each later one 2 s and a wait of half a second."""
    run = Run(1)
    run.ends(9.0, computed=4.0)
    run.ends(11.5, 14.0)
    measured = run.pace.note()
    assert run.pace.note() == {}
    assert (measured["starts"], measured["start_seconds"], measured["worker_seconds"]) == (1, 5.0, 8.0)
    assert estimated(measured, 9000, 1) == pytest.approx((5.0 + 1.5 + 9 * 2.5, 10 / 2.5))
    assert estimated(measured, 9000, 3) == pytest.approx((5.0 + 1.5 + 3 * 2.5, 30 / 2.5))


def test_the_first_part_alone_tells_the_pace_too() -> None:
    run = Run(1)
    run.ends(7.0)
    assert estimated(run.pace.note(), 3000, 1) == pytest.approx((5.0 + 6.0, 5.0))


def test_of_two_workers_one_ends_earlier() -> None:
    """Five parts of 2 s on two workers: while the last one is computed only one of them counts."""
    run = Run(2)
    run.ends(5.0, 5.0, 7.0, 7.0)
    run.pace.begin()
    run.pace.all_begun()
    run.now = 109.0
    run.pace.take(rows=10, size=1000, computed_seconds=2.0)
    assert estimated(run.pace.note(), 8000, 2) == pytest.approx((3.0 + 8.0, 10.0))


def test_a_run_that_has_measured_nothing_says_nothing() -> None:
    assert estimated({}, 100, 1) is None


def test_nothing_that_is_missing_takes_no_start() -> None:
    run = Run(1)
    run.ends(7.0)
    assert estimated(run.pace.note(), 0, 1) == pytest.approx((0.0, 5.0))
