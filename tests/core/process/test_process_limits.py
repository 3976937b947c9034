"""Ending what takes too long in the middle of it, beside other timers of the process."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from torchwright.core.process.limits import TimeIsUp, time_limit


def test_what_takes_too_long_is_ended_even_where_it_swallows_exceptions():
    def stubborn() -> None:
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue

    with pytest.raises(TimeIsUp), time_limit(0.05):
        stubborn()


def test_what_ends_in_time_is_left_alone_and_nothing_rings_later():
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(5.0):
        result = sum(range(10))
    assert result == 45
    assert signal.getsignal(signal.SIGALRM) is before


def test_another_timer_goes_on_with_what_is_left_of_it():
    rung = threading.Event()
    handler = signal.signal(signal.SIGALRM, lambda number, frame: rung.set())
    left, every = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with time_limit(5.0):
            time.sleep(0.05)
        assert not rung.is_set()
        assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
        assert rung.wait(5)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left, every)


def test_in_another_thread_the_block_runs_to_its_end():
    done: list[int] = []

    def work() -> None:
        with time_limit(0.01):
            time.sleep(0.05)
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]
