"""The clock is set back while a job runs: the hang is still noticed and its calls are read."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torchwright.train.hang import record
from torchwright.train.hang.watch import Watch

HOUR = 3600 * 10**9


def test_a_dump_of_another_rank_is_new_after_the_clock_was_set_back(tmp_path: Path) -> None:
    watch = Watch(tmp_path, rank=0, world=2, silence=60)
    path = tmp_path / "rank_1.json"
    path.write_text("{}")
    set_back(path)
    assert watch._others() == {"rank_1.json"}


def test_a_dump_of_an_earlier_run_is_old_until_it_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "rank_1.json"
    path.write_text("{}")
    set_back(path)
    watch = Watch(tmp_path, rank=0, world=2, silence=60)
    assert watch._others() == set()
    path.unlink()
    assert watch._others() == set()
    path.write_text("{}")
    assert watch._others() == {"rank_1.json"}


def test_calls_that_are_stamped_after_the_clock_was_set_back_count() -> None:
    later, monotonic = time.time_ns() + HOUR, time.monotonic_ns()
    began = time.time_ns()
    assert record._since(later, monotonic) <= began
    assert record._since(began - HOUR, time.monotonic_ns()) == began - HOUR, (
        "calls before the jump forward count as well"
    )


def set_back(path: Path) -> None:
    """Give a file the time of change that it has after the clock was set back by an hour."""
    stamp = path.stat().st_mtime_ns - HOUR
    os.utime(path, ns=(stamp, stamp))
