"""The number of threads for parallel code on a machine whose cores other programs use, or whose time a quota limits.

A parallel region of OpenMP ends when its last thread does. If the scheduler gives one thread's core to another program,
all threads of the region wait for it, at every operator. Next to twelve processes of two threads on two cores, a small
MLP took 64 ms a call on two threads and 8 ms on one. Threads that sleep while they wait (`OMP_WAIT_POLICY=PASSIVE`)
took 150 ms there, and twice the time on a quiet machine: fewer threads are the cure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torchwright.core.cpu_load import Load

ROUNDS, WINDOW_SECONDS = 3, 0.1
"""Each count runs in turn for a window, which covers a period of a CPU quota (0.1 s) and several time slices."""
MOST_SECONDS = 3.0
"""No further round is begun then: of a slow model one call with each count has to do."""
SLACK = 1.25
"""A larger count has to be so many times as fast: on a busy machine it is the one that may collapse later."""


@dataclass(frozen=True, kw_only=True)
class ThreadChoice:
    """A chosen number of threads, out of how many, and why there was something to choose."""

    threads: int
    most: int
    reason: str
    """For example "machine busy (load 20 on 2 cores)"."""

    def __str__(self) -> str:
        return f"{self.threads} of {self.most} threads: {self.reason}"


def disturbance(load: Load, threads: int) -> str | None:
    """Why `threads` threads may not run at the same time here, or None."""
    limited = load.quota is not None and load.quota < threads
    return load.trouble or (f"CPU quota of {load.quota:g} cores" if limited else None)


def choose_threads(load: Load, most: int, run: Callable[[int], float]) -> ThreadChoice | None:
    """Choose by calibration where the machine is disturbed; None: nothing speaks against `most` threads.

    `run(threads)` makes calls on so many threads for about `WINDOW_SECONDS` and returns mean seconds of a call: a
    median misses the few calls in which a thread waited for another.
    """
    reason = disturbance(load, most)
    if reason is None or most == 1:
        return None
    # A quota of 7.65 cores is 7 threads: with one more, all wait while the group is throttled.
    tried = counts(min(most, load.threads))
    threads = fastest(calibrate(tried, run)) if len(tried) > 1 else tried[0]
    return ThreadChoice(threads=threads, most=most, reason=reason)


def counts(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return [*(2**power for power in range((most - 1).bit_length())), most]


def calibrate(
    tried: Sequence[int], run: Callable[[int], float], clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Mean seconds of a call for each count, over rounds in which the counts take turns."""
    sums, rounds, begun = dict.fromkeys(tried, 0.0), 0, clock()
    while rounds < ROUNDS and (not rounds or clock() - begun < MOST_SECONDS):
        for count in tried:
            sums[count] += run(count)
        rounds += 1
    return {count: total / rounds for count, total in sums.items()}


def fastest(seconds: dict[int, float]) -> int:
    """The smallest count that is not clearly slower than the best."""
    least = min(seconds.values())
    return min(count for count, mean in seconds.items() if mean <= SLACK * least)


def mean_seconds(call: Callable[[], object], threads: int, window: float = WINDOW_SECONDS) -> float:
    """Mean seconds of a call on `threads` threads, over as many calls as begin within `window` after the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        call()  # a thread that is new has to start
        made, begun = 0, time.perf_counter()
        while not made or time.perf_counter() - begun < window:
            call()
            made += 1
        return (time.perf_counter() - begun) / made
    finally:
        torch.set_num_threads(before)


def small_training_step() -> Callable[[], object]:
    """A step of a small model, for code whose own steps cannot be repeated: about a millisecond on one thread."""
    width, rows = 256, 64
    x_BE = torch.ones(rows, width)
    weights = [torch.full((width, width), 1 / width, requires_grad=True) for _ in range(4)]

    def step() -> None:
        h_BE = x_BE
        for w_EE in weights:
            h_BE = nn.functional.gelu(nn.functional.linear(h_BE, w_EE))
        torch.autograd.grad(h_BE.square().mean(), weights)

    return step
