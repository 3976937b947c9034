"""The callable that replaces the user's NumPy function."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Unpack, overload

import torch

from torchwright.core.errors import TorchwrightError
from torchwright.optimization.numpy.call import ArrayCall
from torchwright.optimization.numpy.check import Check
from torchwright.optimization.numpy.narrow import in_float64, narrowed
from torchwright.optimization.numpy.options import OptionFields, Options
from torchwright.optimization.numpy.original import numpy_errors_are_trapped, run_original
from torchwright.optimization.numpy.program import Program, Unchecked
from torchwright.optimization.numpy.report import NumpyReport, ProgramRefused, first_line
from torchwright.optimization.numpy.tensors import as_arrays, as_tensors, has_tensors

MAX_RECHECKS = 6
"""Guard misses per key before it is called a recompile storm; below Dynamo's own limit of 8, where it goes
silently to eager."""


@dataclass(slots=True)
class _Decision:
    """The program that serves calls of one kind; None is the original."""

    report: NumpyReport
    program: Program | None = None
    rechecks: int = 0


class CompiledNumpy:
    """A NumPy function that is served by compiled code where that agrees with NumPy and is faster.

    Call it as the function it wraps. ``report`` tells what the last check found, ``reports`` tell all.
    """

    max_texts: int = 4
    """Calls that differ in a text alone are kinds of their own up to here (a mode); beyond, the text may be any (a
    label): code that reads it is guarded by its value, and so checked anew."""
    max_kinds: int = 64
    """Kinds of calls that are judged; who calls in ever new ways would wait for a check each time."""
    quiet_seconds: float = 2.0
    """A check that ends sooner says nothing: most people wait that long without asking why."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        self.__name__ = type(fn).__name__
        functools.update_wrapper(self, fn)
        self.__wrapped__ = fn
        self.options = options
        self._original = in_float64(fn) if options.float32 else fn
        self._check = Check(self._original, fn, self.__name__, options)
        self._lock = threading.RLock()
        self._decisions: dict[tuple[Any, ...], _Decision] = {}
        self._texts: Counter[tuple[Any, ...]] = Counter()
        self._report = NumpyReport(function=self.__name__, status="unmeasured", reason="not called yet")

    @property
    def report(self) -> NumpyReport:
        """The latest check's result: the first call of each kind, a guard miss, or a refusal."""
        return self._report

    @property
    def reports(self) -> tuple[NumpyReport, ...]:
        """One report for each kind of call seen (structure, dtypes, ranks, size class)."""
        return tuple(decision.report for decision in self._decisions.values())

    def __repr__(self) -> str:
        return f"<CompiledNumpy {self.__name__}: {self._report.status}>"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # called from a function that is itself being traced
            return self.__wrapped__(*args, **kwargs)
        if has_tensors(args, kwargs):
            arrays, named = as_arrays(self.__name__, args, kwargs)
            return as_tensors(self(*arrays, **named))
        if self.options.float32:
            args, kwargs = narrowed(args), narrowed(kwargs)
        try:
            call = ArrayCall.describe(args, kwargs)
        except ProgramRefused as refusal:
            reason = str(refusal)
        else:
            return self._dispatch(call)
        return self._refused(args, kwargs, reason)

    def _refused(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
        result = self._original(*args, **kwargs)  # outside any handler: its errors must not mention ours
        self._check.raise_if_strict(reason)
        self._report = NumpyReport(function=self.__name__, status="original", reason=reason)
        return result

    def _dispatch(self, call: ArrayCall) -> Any:
        decision = self._decisions.get(call.key)
        if decision is None:
            with self._lock:
                if self._texts[call.key_of_any_text] >= self.max_texts:
                    call.key = call.key_of_any_text
                decision = self._decisions.get(call.key)
                if decision is None and len(self._decisions) < self.max_kinds:
                    return self._first_call(call)
            if decision is None:
                reason = (
                    f"it is called in more than {self.max_kinds} ways: lengths, names, texts, dtypes or sizes"
                )
                return self._refused(call.args, call.kwargs, reason)
        if decision.program is None or numpy_errors_are_trapped():
            return self._original(*call.args, **call.kwargs)
        try:
            return decision.program.serve(call)
        except Exception as error:
            failure = error
        return self._after_failure(decision, call, failure)

    def _first_call(self, call: ArrayCall) -> Any:
        original = run_original(self._original, call)
        if not numpy_errors_are_trapped():  # compiled code raises none: judge on a call without traps
            with self._announced(call):
                self._report, program = self._check.judge(call, original)
            self._decisions[call.key] = _Decision(self._report, program)
            if call.key != call.key_of_any_text:
                self._texts[call.key_of_any_text] += 1
        return original.result

    def _announced(self, call: ArrayCall) -> contextlib.AbstractContextManager[None]:
        shown = self.options.progress
        return announced(f"{self.__name__}{call.pretty()}", shown=shown, seconds=self.quiet_seconds)

    def _after_failure(self, decision: _Decision, call: ArrayCall, error: Exception) -> Any:
        """A served call raised. Nothing was written, so NumPy can be asked; users see its errors."""
        if decision.program is not None and _caused_by(error, Unchecked):
            with self._lock:
                return self._recheck(decision, decision.program, call)
        result = self._original(*call.args, **call.kwargs)
        self._demote(decision, f"compiled code raised where NumPy did not: {first_line(error)}")
        return result

    def _recheck(self, decision: _Decision, program: Program, call: ArrayCall) -> Any:
        """A guard miss: the new graph goes through the comparison before it may serve."""
        original = run_original(self._original, call)
        decision.rechecks += 1
        refusal = original.refusal
        if decision.rechecks > MAX_RECHECKS:
            refusal = (
                f"recompile storm: {decision.rechecks} guard misses; keep Python values and shapes steadier,"
                " pass scalars as 0-d arrays, or try dynamic=True"
            )
        if refusal is None:
            with self._announced(call):
                refusal = self._check.verify(call, original.result, program).refusal
        if refusal is not None:
            self._demote(decision, refusal)
            return original.result
        self._report = decision.report = replace(
            decision.report,
            rechecks=decision.rechecks,
            graphs=program.graphs,
            graph_breaks=sum(program.breaks.values()),
            compile_seconds=program.compile_seconds,
        )
        return original.result

    def _demote(self, decision: _Decision, reason: str) -> None:
        decision.program = None
        self._report = decision.report = replace(
            decision.report, status="original", reason=reason, rechecks=decision.rechecks
        )
        self._check.raise_if_strict(reason)


@overload
def compile_numpy(fn: Callable[..., Any], **options: Unpack[OptionFields]) -> CompiledNumpy: ...
@overload
def compile_numpy(
    fn: None = None, **options: Unpack[OptionFields]
) -> Callable[[Callable[..., Any]], CompiledNumpy]: ...
def compile_numpy(fn: Callable[..., Any] | None = None, **options: Unpack[OptionFields]) -> Any:
    """Compile a pure NumPy function, check it against NumPy, and serve whichever is faster.

    ``fn`` takes arrays, scalars and plain Python data (nested in tuples, lists, dicts) and returns the same.
    On the first call of each kind it runs several times, so it must be pure; one that writes into its
    arguments, assigns outer names or draws from ``np.random`` is recognised and stays with NumPy.
    Where an argument is a torch tensor on the CPU, results are tensors; neither way copies their memory.
    ``options`` are the fields of ``Options``: threads, device, float32, rtol, atol, dynamic, strict, measure,
    measure_seconds, progress. Without ``fn`` it returns a decorator.

    Raises TorchwrightError for options that are out of range, a device that is not there, tensors on several
    devices, and a tensor that NumPy cannot read. Whatever ``fn``
    raises is raised unchanged. Source: NumPy support in Dynamo (https://pytorch.org/blog/compiling-numpy-code/).
    """
    if fn is None:
        return functools.partial(compile_numpy, **options)
    if not callable(fn):
        raise TorchwrightError(
            "compile_numpy needs a function",
            found=repr(fn),
            allowed="a callable",
            next="@compile_numpy above a def",
        )
    return CompiledNumpy(fn, Options(**options))


def _caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind) or isinstance(getattr(error, "inner_exception", None), kind):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def announced(what: str, *, shown: bool, seconds: float) -> Iterator[None]:
    """Print one line to stderr if the block takes longer than `seconds`."""

    def say() -> None:
        line = (
            f"compile_numpy: compiling {what}, longer than {seconds:g} s so far (progress=False hides this)"
        )
        print(line, file=sys.stderr, flush=True)

    timer = threading.Timer(seconds, say)
    timer.daemon = True
    if shown:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
