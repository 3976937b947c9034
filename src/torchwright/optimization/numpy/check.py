"""The check: compiled candidates run on the caller's arguments, are compared with NumPy, and are timed in turn."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from torchwright.core.errors import TorchwrightError
from torchwright.hardware.measure.clock import Rounds, Waiting, paired_speedup
from torchwright.optimization.numpy.call import ArrayCall
from torchwright.optimization.numpy.compare import Deviation, compare, no_less_accurate, require_own_memory
from torchwright.optimization.numpy.options import Options
from torchwright.optimization.numpy.original import Original, time_original
from torchwright.optimization.numpy.program import Program, Variant
from torchwright.optimization.numpy.report import NumpyReport, ProgramRefused, first_line

CALL_FLOOR_SECONDS = 15e-6
"""The least cost of a compiled call (guards, conversion, dispatch). Faster functions are left alone."""
CHEAP_CALL_SECONDS = 0.05
"""Calls up to this long are repeated before anything is compiled for them, which takes seconds."""
EDGE_VALUES = {
    "with NaN, infinity and integer zeros": ((np.nan, np.inf, -np.inf), (0,)),
    "with zeros, halves and negative values": ((0.0, -0.0, -1.5, 0.5, -0.5, 2.5, -0.7), (-1, -2)),
    "with large and subnormal values": ((1000.5, -730.25, 1e-40, 5e-324), ()),
}
"""Name → values strewn into floating-point and into integer arguments. Larger ones could become the size of an array:
the operations are probed with them one by one (semantics.py)."""
FEWEST_GAIN = 2.0
"""The gain of a single round that lets compiled code serve: first runs were seen several times slower than later ones,
but not those of functions that take seconds."""


@dataclass
class CheckedProgram:
    """One program, compared with NumPy."""

    program: Program
    comparison: Deviation = field(default_factory=Deviation)
    refusal: str | None = None
    """Why it may not serve, or None."""


class Check:
    """Judges calls of one function; its programs are kept and shared by calls of one signature."""

    fewest_rounds: int = 3
    """Fewer have no interval to speak of."""
    most_rounds: int = 21

    def __init__(
        self, original: Callable[..., Any], traced: Callable[..., Any], name: str, options: Options
    ) -> None:
        self._fn, self._traced, self._name, self._options = original, traced, name, options
        self._programs: dict[tuple[tuple[Any, ...], Variant], Program] = {}

    def judge(self, call: ArrayCall, original: Original) -> tuple[NumpyReport, Program | None]:
        """Return the program that serves calls of this kind from now on; None is the original.

        Raises TorchwrightError under ``strict`` where it is the original for any reason but speed.
        """
        options, reference, seconds = self._options, original.result, original.seconds
        base = NumpyReport(function=self._name, status="original", reason="", signature=call.pretty())
        if original.refusal is not None:
            self.raise_if_strict(original.refusal)
            return replace(base, reason=original.refusal), None
        floor = CALL_FLOOR_SECONDS
        if options.measure and seconds < CHEAP_CALL_SECONDS:  # the first call may have been disturbed
            seconds = min(seconds, *(time_original(self._fn, call) for _ in range(3)))
            if seconds < floor:
                reason = f"NumPy takes {seconds * 1e6:.1f} us, a compiled call at least {floor * 1e6:.0f} us"
                return replace(base, reason=reason, numpy_ms=seconds * 1e3), None

        threads = 1 if options.device != "cpu" else options.threads or torch.get_num_threads()
        tried = self._explore(call, reference, threads)
        agreeing = [one for one in tried if one.refusal is None]
        first = (agreeing or tried)[0]
        base = replace(
            base,
            compile_seconds=sum(one.program.compile_seconds for one in tried),
            graphs=first.program.graphs,
            graph_breaks=sum(first.program.breaks.values()),
            break_reasons=tuple(first_line(text) for text in first.program.breaks),
            dtype_differences=tuple(tried[0].comparison.dtype_differences),
            threads=threads,
            max_relative_error=max((one.comparison.error for one in agreeing), default=None),
            float64_default=first.program.variant.float64_default,
            candidates=tuple(f"{one.program.variant}: {one.refusal or 'agrees with NumPy'}" for one in tried),
        )
        if first.refusal is not None:
            self.raise_if_strict(first.refusal)
            return replace(base, reason=first.refusal), None
        base = replace(base, edge_differences=self._edge_differences(call, first.program, seconds))
        if base.edge_differences:
            reason = f"disagrees with NumPy {base.edge_differences[0]}"
            self.raise_if_strict(reason)
            return replace(base, reason=reason), None
        if not options.measure:
            reason = "agrees with NumPy; not timed (measure=False)"
            return replace(base, status="compiled", reason=reason), first.program
        return self._time(call, base, [one.program for one in agreeing], seconds)

    def verify(self, call: ArrayCall, reference: Any, program: Program) -> CheckedProgram:
        """Check that a program returns what NumPy returned, twice, in memory of its own."""
        attempt = CheckedProgram(program)
        try:
            program.learn_scalars(reference)
            results = [program.check(call) for _ in range(2)]
            for result in results:
                attempt.comparison = found = compare(
                    reference, result, self._options.rtol, self._options.atol
                )
                if found.dtype_differences:
                    raise ProgramRefused(f"another dtype than NumPy: {found.dtype_differences[0]}")
                if found.problems and (
                    len(found.outside) < len(found.problems)
                    or not no_less_accurate(call, self._fn, reference, result, found.outside)
                ):
                    raise ProgramRefused(f"disagrees with NumPy: {found.problems[0]}")
            require_own_memory(call, reference, *results)
        except ProgramRefused as refusal:
            attempt.refusal = str(refusal)
            attempt.comparison.dtype_differences += program.dtype_differences
        return attempt

    def raise_if_strict(self, reason: str) -> None:
        """Raises TorchwrightError under ``strict``: the original would have to serve."""
        if self._options.strict:
            raise TorchwrightError(
                f"{self._name} cannot be served by compiled code",
                found=reason,
                allowed="a pure function of arrays and plain data, with NumPy's results when traced",
                next="drop strict=True to let the original serve, or rewrite the part that is named",
            )

    def _explore(self, call: ArrayCall, reference: Any, threads: int) -> list[CheckedProgram]:
        """Everything that was tried, in order. Further candidates only where they can help."""

        def attempt(variant: Variant) -> CheckedProgram:
            slot = (call.signature, variant)
            if slot not in self._programs:
                options = self._options
                self._programs[slot] = Program(self._traced, variant, options.device, options.dynamic)
            return self.verify(call, reference, self._programs[slot])

        first = attempt(Variant(threads))
        tried = [first]
        if first.program.graphs and (first.comparison.dtype_differences or first.comparison.outside):
            tried.append(attempt(Variant(threads, float64_default=True)))
        elif first.program.breaks:
            tried.append(attempt(Variant(threads, dynamic_outputs=True)))
        agreeing = [one for one in tried if one.refusal is None]
        if agreeing and threads > 1 and self._options.measure:
            tried.append(attempt(replace(agreeing[-1].program.variant, threads=1)))
        return tried

    def _edge_differences(self, call: ArrayCall, program: Program, seconds: float) -> tuple[str, ...]:
        """Compare on copies of the arguments with special values strewn in.

        Left out where it could take long: a slow function, or one with graph breaks, which may loop on its data.
        """
        if program.breaks or seconds > self._options.measure_seconds:
            return ()
        problems = {
            name: self._edge_difference(
                ArrayCall.describe(*call.with_arrays(functools.partial(_strew, *values))), program
            )
            for name, values in EDGE_VALUES.items()
        }
        return tuple(f"{name}: {problem}" for name, problem in problems.items() if problem)

    def _edge_difference(self, call: ArrayCall, program: Program) -> str | None:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                result = program.serve(call)
            except Exception:  # a served call would go to NumPy
                return None
            try:
                reference = self._fn(*call.args, **call.kwargs)
            except Exception as error:
                return f"NumPy raises {type(error).__name__} ({first_line(error)}), compiled code does not"
        found = compare(reference, result, self._options.rtol, self._options.atol, _largest(call))
        if not found.problems or (
            len(found.outside) == len(found.problems)
            and no_less_accurate(call, self._fn, reference, result, found.outside)
        ):
            return None
        return found.problems[0]

    def _time(
        self, call: ArrayCall, base: NumpyReport, programs: list[Program], seconds: float
    ) -> tuple[NumpyReport, Program | None]:
        """Original and candidates in turn; the best candidate serves if its interval lies above 1."""
        once = [_time_served(program, call) for program in programs]
        room = max(
            self._options.measure_seconds, base.compile_seconds
        )  # three rounds may take what compiling took
        fitting = int(self._options.measure_seconds / (seconds + sum(once)))
        wanted = min(max(fitting, self.fewest_rounds), self.most_rounds)
        if wanted * (seconds + sum(once)) > room:
            return self._judge_single_run(base, programs, seconds, once)
        rounds = self._take_rounds(call, programs, wanted)
        originals, *samples = zip(*rounds.counted, strict=True)
        medians = [statistics.median(sample) for sample in samples]
        best = medians.index(min(medians))
        speedup = paired_speedup(originals, samples[best])
        speedup = speedup.on_busy_machine() if rounds.busy else speedup
        report = replace(
            _with_times(base, programs, statistics.median(originals), medians),
            speedup=speedup.value,
            speedup_interval=(speedup.low, speedup.high),
            busy=rounds.busy,
            rounds=len(originals),
        )
        if speedup.low > 1:
            report = replace(report, status="compiled", reason="agrees with NumPy and is faster")
            return report, programs[best]
        return replace(report, reason="agrees with NumPy, but compiling does not make it faster"), None

    def _judge_single_run(
        self, base: NumpyReport, programs: list[Program], seconds: float, once: list[float]
    ) -> tuple[NumpyReport, Program | None]:
        """Decide on the only run of each where rounds would take too long; nothing is claimed of the speed."""
        best = once.index(min(once))
        report = replace(_with_times(base, programs, seconds, once), rounds=1)
        none = f"no speed-up is claimed: {self.fewest_rounds} rounds do not fit into measure_seconds"
        if seconds / once[best] < FEWEST_GAIN:
            reason = f"agrees with NumPy, but was not twice as fast in the only run of each; {none}"
            return replace(report, reason=reason), None
        reason = f"agrees with NumPy and was faster in the only run of each; {none}"
        return replace(report, status="compiled", reason=reason), programs[best]

    def _take_rounds(self, call: ArrayCall, programs: list[Program], wanted: int) -> Rounds[list[float]]:
        """Seconds of the original and of each program, round by round; disturbed rounds are made up for."""
        timers = [functools.partial(time_original, self._fn)]
        timers += [functools.partial(_time_served, program) for program in programs]
        rounds = Rounds[list[float]](enough=wanted)
        while len(rounds.quiet) < wanted and len(rounds.all) < 2 * wanted:
            first = len(rounds.all) % len(timers)
            earlier, begun = Waiting.now(), time.perf_counter()
            seconds = [0.0] * len(timers)
            for place in (*range(first, len(timers)), *range(first)):
                seconds[place] = timers[place](call)
            rounds.add(seconds, Waiting.now().since(earlier) / (time.perf_counter() - begun))
        return rounds


def _with_times(
    base: NumpyReport, programs: list[Program], original: float, seconds: list[float]
) -> NumpyReport:
    """The report with the times of the original and of each program."""
    best = seconds.index(min(seconds))
    timed = [f"{one.variant}: {once * 1e3:.3f} ms" for one, once in zip(programs, seconds, strict=True)]
    refused = [text for text in base.candidates if not text.endswith("agrees with NumPy")]
    return replace(
        base,
        numpy_ms=original * 1e3,
        compiled_ms=seconds[best] * 1e3,
        threads=programs[best].variant.threads,
        candidates=(*timed, *refused),
    )


def _largest(call: ArrayCall) -> float:
    """The largest finite magnitude among floating-point arguments."""
    floats = [np.abs(array[np.isfinite(array)]) for array in call.arrays if array.dtype.kind in "fc"]
    return max((float(values.max(initial=0.0)) for values in floats), default=0.0)


def _time_served(program: Program, call: ArrayCall) -> float:
    started = time.perf_counter()
    program.serve(ArrayCall.describe(call.args, call.kwargs))
    return time.perf_counter() - started


def _strew(floats: tuple[float, ...], integers: tuple[int, ...], array: np.ndarray) -> np.ndarray:
    """A copy with special values at about every second place."""
    values = {"f": floats, "c": floats, "i": integers}.get(array.dtype.kind)
    if not values or not array.size:
        return array
    copy = array.copy(order="K")
    with np.errstate(all="ignore"):
        for index, value in enumerate(values):
            copy.flat[index :: 2 * len(values)] = value
    return copy
