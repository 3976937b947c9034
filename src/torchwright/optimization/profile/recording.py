# pyright: basic
"""Calls under torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from torchwright.core.records import DeviceFacts
from torchwright.optimization.profile.events import read
from torchwright.optimization.profile.summing import CALL, COMPILED, summed
from torchwright.optimization.profile.values import CallTime, Recording
from torchwright.workloads.base import Case, Run

RECORD_SECONDS = 1.0
"""A kind of call is recorded until its calls have taken this long, within these bounds."""
FEWEST_CALLS, MOST_CALLS = 2, 20


def record(
    run: Run,
    cases: Sequence[Case],
    device: DeviceFacts,
    *,
    named: bool = False,
    trace: Path | None = None,
    most_calls: int | None = None,
) -> Recording:
    """Make each of `cases` up to `most_calls` times under the profiler.

    They were made before, so that nothing compiles now.

    `named` says that kernels were compiled with their names: what compiled code spends outside of them is idle then,
    and not kernels that nobody can tell apart. `trace` is where the profiler's own file goes.
    """
    with torch.inference_mode():
        unrecorded = {case.name: _seconds(run, case) for case in cases}
        numbers = {
            name: max(FEWEST_CALLS, min(most_calls or MOST_CALLS, int(RECORD_SECONDS / seconds)))
            for name, seconds in unrecorded.items()
        }
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
            for case in cases:
                for _ in range(numbers[case.name]):
                    with record_function(CALL + case.name):
                        run(case)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    calls = [
        CallTime(
            name=case.name,
            unrecorded_seconds=unrecorded[case.name],
            repeat=case.repeat,
            recorded=numbers[case.name],
        )
        for case in cases
    ]
    return summed(read(profiler), calls, device, named=named)


@contextmanager
def labelled(owner: type, method: str) -> Generator[None]:
    """Within the block `method` of `owner` is recorded as compiled code."""
    plain = getattr(owner, method)

    def recorded(*args: object, **kwargs: object) -> object:
        with record_function(COMPILED):
            return plain(*args, **kwargs)

    setattr(owner, method, recorded)
    try:
        yield
    finally:
        setattr(owner, method, plain)


def _seconds(run: Run, case: Case) -> float:
    """Return the seconds of the fastest of three calls."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run(case)
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-6)
