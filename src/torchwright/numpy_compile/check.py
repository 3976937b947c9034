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

from torchwright.errors import TorchwrightError
from torchwright.measure.clock import Rounds, Waiting, paired_speedup
from torchwright.numpy_compile.call import ArrayCall
from torchwright.numpy_compile.compare import Deviation, compare, no_less_accurate, require_own_memory
from torchwright.numpy_compile.options import Options
from torchwright.numpy_compile.original import Original, time_original
from torchwright.numpy_compile.program import Program, Variant
from torchwright.numpy_compile.report import NumpyReport, ProgramRefused, first_line

CALL_FLOOR_SECONDS = 15e-6
"""What a compiled call costs at least (guards, conversion, dispatch). Faster functions are left alone."""
CHEAP_CALL_SECONDS = 0.05
"""Calls up to this long are repeated before anything is compiled for them, which takes seconds."""
MAX_ROUNDS = 21
FEWEST_ROUNDS = 3
"""Fewer have no interval to speak of."""
EDGE_VALUES = {
    "with NaN, infinity and integer zeros": ((np.nan, np.inf, -np.inf), (0,)),
    "with zeros and negative values": ((0.0, -1.5), (-1, -2)),
}
"""Name → values strewn into floating-point and into integer arguments."""


@dataclass
class CheckedProgram:
    """One program, set beside NumPy."""

    program: Program
    comparison: Deviation = field(default_factory=Deviation)
    refusal: str | None = None
    """Why it may not serve, or None."""


class Check:
    """Judges calls of one function; its programs are kept and shared by calls of one signature."""

    def __init__(
        self, original: Callable[..., Any], traced: Callable[..., Any], name: str, options: Options
    ) -> None:
        self._fn, self._traced, self._name, self._options = original, traced, name, options
        self._programs: dict[tuple[tuple[Any, ...], Variant], Program] = {}

    def judge(self, call: ArrayCall, original: Original) -> tuple[NumpyReport, Program | None]:
        """What serves calls of this kind from now on; None is the original.

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
            self.raise_if_strict(base.edge_differences[0])
        if not options.measure:
            reason = "agrees with NumPy; not timed (measure=False)"
            return replace(base, status="compiled", reason=reason), first.program
        return self._time(call, base, [one.program for one in agreeing], seconds)

    def verify(self, call: ArrayCall, reference: Any, program: Program) -> CheckedProgram:
        """Whether a program returns what NumPy returned, twice, in memory of its own."""
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
        found = compare(reference, result, self._options.rtol, self._options.atol)
        rounding = len(found.outside)  # near special values only the special ones are judged
        return found.problems[0] if len(found.problems) > rounding else None

    def _time(
        self, call: ArrayCall, base: NumpyReport, programs: list[Program], seconds: float
    ) -> tuple[NumpyReport, Program | None]:
        """Original and candidates in turn; the best candidate serves if its interval lies above 1."""
        once = [_time_served(program, call) for program in programs]
        wanted = min(int(self._options.measure_seconds / (seconds + sum(once))), MAX_ROUNDS)
        if wanted >= FEWEST_ROUNDS:
            rounds = self._take_rounds(call, programs, wanted)
        else:  # too dear to repeat: the runs of the check are the only sample
            rounds = Rounds[list[float]](enough=1)
            rounds.add([seconds, *once], 0.0)
        originals, *samples = zip(*rounds.counted, strict=True)
        medians = [statistics.median(sample) for sample in samples]
        best = medians.index(min(medians))
        speedup = None
        if wanted >= FEWEST_ROUNDS:
            speedup = paired_speedup(originals, samples[best])
            speedup = speedup.on_busy_machine() if rounds.busy else speedup
        report = replace(
            base,
            speedup=speedup.value if speedup else originals[0] / medians[best],
            speedup_interval=(speedup.low, speedup.high) if speedup else None,
            busy=rounds.busy,
            numpy_ms=statistics.median(originals) * 1e3,
            compiled_ms=medians[best] * 1e3,
            rounds=len(originals),
            threads=programs[best].variant.threads,
            candidates=(
                *(
                    f"{one.variant}: {median * 1e3:.3f} ms"
                    for one, median in zip(programs, medians, strict=True)
                ),
                *(text for text in base.candidates if not text.endswith("agrees with NumPy")),
            ),
        )
        # A single round has no interval: ask for a gain that noise does not make.
        if (speedup.low if speedup else originals[0] / medians[best] / 1.2) > 1:
            report = replace(report, status="compiled", reason="agrees with NumPy and is faster")
            return report, programs[best]
        return replace(report, reason="agrees with NumPy, but compiling does not make it faster"), None

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


def _time_served(program: Program, call: ArrayCall) -> float:
    started = time.perf_counter()
    program.serve(ArrayCall.describe(call.args, call.kwargs))
    return time.perf_counter() - started


def _strew(floats: tuple[float, ...], integers: tuple[int, ...], array: np.ndarray) -> np.ndarray:
    """A copy with special values at about every fifth place."""
    values = {"f": floats, "c": floats, "i": integers}.get(array.dtype.kind)
    if values is None or not array.size:
        return array
    copy = array.copy(order="K")
    for index, value in enumerate(values):
        copy.flat[index :: 5 * len(values)] = value
    return copy
