"""What `--dry-run` says: with the waits of workers, and the start of the next run."""

from __future__ import annotations

from torchwright.map.pace import Pace, estimated


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def taken(pace: Pace, clock: Clock, at: float, *, rows: int = 10, seconds: float = 2.0) -> None:
    clock.now = 100.0 + at
    pace.take(rows=rows, size=100 * rows, computed_seconds=seconds)


def test_a_worker_waits_between_its_parts() -> None:
    """Parts of 2 s, every 2.5 s, after a start of 5 s."""
    clock = Clock()
    pace = Pace(1, clock)
    for at in (7.0, 9.5, 12.0):
        taken(pace, clock, at)
    measured = pace.note()
    assert measured == {
        "starts": 1,
        "start_seconds": 5.0,
        "rows": 30,
        "bytes": 3000,
        "seconds": 7.0,
        "worker_seconds": 6.0,
    }
    assert pace.note() == {}
    assert estimated(measured, 9000, 1) == (5.0 + 21.0, 30 / 7.0)
    assert estimated(measured, 9000, 3) == (5.0 + 7.0, 90 / 7.0)


def test_two_workers_begin_together() -> None:
    """The second one's first part comes at once after the first one's, and took as long."""
    clock = Clock()
    pace = Pace(2, clock)
    for at in (5.0, 5.1, 7.5, 7.6):
        taken(pace, clock, at)
    measured = pace.note()
    assert measured["seconds"] == 2.0 + 2.0 + 2 * (7.6 - 5.1)
    seconds, _ = estimated(measured, 4000, 2) or (0.0, 0.0)
    assert abs(seconds - (3.0 + 4.5)) < 1e-9


def test_a_run_that_has_measured_nothing_says_nothing() -> None:
    assert estimated({}, 100, 1) is None


def test_nothing_that_is_missing_takes_no_start() -> None:
    clock = Clock()
    pace = Pace(1, clock)
    taken(pace, clock, 7.0)
    assert estimated(pace.note(), 0, 1) == (0.0, 5.0)
