# pyright: basic
"""A workload's calls of one model, in the process that times them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from torchwright.core.errors import ModelError, TorchwrightError, first_line
from torchwright.hardware.devices.base import Device
from torchwright.hardware.measure.clock import Waiting
from torchwright.hardware.measure.page_faults import page_faults
from torchwright.hardware.measure.threads import mean_seconds
from torchwright.workloads.base import Case, Run, changed_tensors, own_tensors

TURN_SECONDS = 0.02
"""A turn of timing repeats a short call until it has taken this long."""
TURN_CALLS = 64
LONG_SECONDS = 0.1
"""A call this long warms its own caches: none is made before it that is not counted."""
VERY_LONG_SECONDS = 0.5
"""A call this long is warm after the first."""


class TimedCalls:
    """Calls that have been made, so that what compiles at the first call has compiled.

    Raises what the model raises; of an `original` it is a `ModelError`.
    """

    def __init__(self, run: Run, cases: Sequence[Case], device: Device, *, original: bool = False) -> None:
        self.run, self.cases, self._device = run, list(cases), device
        self.waited = 0.0
        """The share of the last turn that a thread of this process, ready to run, waited for a core: others ran."""
        self._changing: set[str] = set()
        self.once: dict[str, float] = {}
        """Seconds of a warm call of each case."""
        self._numbers: dict[str, int] = {}
        with torch.inference_mode():
            for case in self.cases:
                try:
                    once = self._warm_up(case)
                except TorchwrightError:
                    raise
                except Exception as error:
                    if not original:
                        raise
                    raise ModelError(
                        f"the model fails on its own inputs (call '{case.name}')",
                        found=f"{type(error).__name__}: {first_line(error)}",
                        next="call the model on these inputs yourself first",
                    ) from error
                self.once[case.name] = once
                self._numbers[case.name] = max(1, min(TURN_CALLS, round(TURN_SECONDS / max(once, 1e-6))))

    @property
    def changing(self) -> frozenset[str]:
        """Return the names of the calls that change their inputs in place."""
        return frozenset(self._changing)

    def turn(self) -> dict[str, float]:
        """Seconds a call of every case, over so many calls that they take a while; before short ones a call that is not
        counted."""
        seconds = {}
        earlier, begun = Waiting.now(), time.perf_counter()
        with torch.inference_mode():
            for case in self.cases:
                if self.once[case.name] < LONG_SECONDS:
                    self.run(self._given(case))
                    self._device.synchronize()
                given = [self._given(case) for _ in range(self._numbers[case.name])]
                seconds[case.name] = self._seconds(given) / len(given)
        self.waited = Waiting.now().since(earlier) / (time.perf_counter() - begun)
        return seconds

    def mean_seconds(self, threads: int) -> float:
        """Mean seconds of a pass over all cases on `threads` threads, for about a tenth of a second."""
        with torch.inference_mode():
            return mean_seconds(self._pass, threads)

    def _pass(self) -> None:
        for case in self.cases:
            self.run(self._given(case))
        self._device.synchronize()

    def each_once(self) -> dict[str, int]:
        """Make every call; how many pages the kernel gave anew for each."""
        faults = {}
        with torch.inference_mode():
            for case in self.cases:
                given, before = self._given(case), page_faults()
                self.run(given)
                faults[case.name] = page_faults() - before
        return faults

    def _seconds(self, given: Sequence[Case]) -> float:
        self._device.synchronize()
        start = time.perf_counter()
        for case in given:
            self.run(case)
        self._device.synchronize()
        return time.perf_counter() - start

    def _warm_up(self, case: Case) -> float:
        """Seconds of a call once it is warm."""
        start = time.perf_counter()
        self._run_first(case)
        self._device.synchronize()
        first = time.perf_counter() - start
        if first < VERY_LONG_SECONDS:
            self.run(self._given(case))
        return self._seconds([self._given(case)])  # the first may have compiled

    def _run_first(self, case: Case) -> None:
        """The first call, on inputs of its own, to see whether it changes them."""
        if case.fixed:  # what it writes into is a cache, the same at every call
            self.run(case)
            return
        self._changing.add(case.name)
        given = self._given(case)
        self.run(given)
        if not changed_tensors((case.args, case.kwargs), (given.args, given.kwargs)):
            self._changing.remove(case.name)

    def _given(self, case: Case) -> Case:
        """The call, with fresh inputs where it changes those that it is given."""
        if case.name not in self._changing:
            return case
        args, kwargs = own_tensors((case.args, case.kwargs))
        return replace(case, args=args, kwargs=kwargs)
