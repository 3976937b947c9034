"""Turn a NumPy function into a compiled one that keeps NumPy's semantics, and keep it only if it pays.

``torch.compile`` can trace NumPy, but nothing in it promises that the traced function returns what NumPy
would have returned, or that it is faster. ``compile_numpy`` adds both. The journey of a call:

1. The arguments are described by a key: their structure, dtypes, ranks and size class.
2. A new key goes through the *check*: the original runs on the real arguments, compiled candidates run on the
   same arguments, their results are compared, and all of them are timed in turn.
3. The winner serves every later call with that key. If none agrees and is faster, the original serves.
4. A served call may run only graphs that went through the check. A guard miss (a new shape, a new Python
   value) sends the call back to the check; too many of those and the original serves for good.

Graphs that write into an argument are refused, so a failed compiled call can always be repeated by the
original: that is how errors raised by ``fn`` keep NumPy's type and message.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import statistics
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch

from torchwright.errors import TorchwrightError

__all__ = ["CompiledNumpy", "NumpyReport", "compile_numpy"]

RTOL = {"float16": 4e-3, "float32": 1e-5, "complex64": 1e-5, "float64": 1e-10, "complex128": 1e-10}
"""Relative tolerance by dtype of the result. Integers and booleans must be equal."""
ATOL_EPS = 16
"""Absolute tolerance, in units of the dtype's epsilon times the largest magnitude in the NumPy result."""
WIDER_FACTOR = 4
"""A result outside the tolerance still agrees if it is at most this many times as far from the same function
in the next wider precision as NumPy itself is (sums that cancel; long sums in float32)."""
CALL_FLOOR_SECONDS = 15e-6
"""What a compiled call costs at least (guards, conversion, dispatch). Faster functions are left alone."""
MAX_RECHECKS = 6
"""Guard misses per key before it is called a recompile storm; below Dynamo's own limit of 8, where it goes
silently to eager."""
MAX_ROUNDS = 21

_SERIAL = itertools.count()
_THREADS_LOCK = threading.RLock()
_SAFE_INDUCTOR = {
    # With g++ < 13, loading a kernel linked with unsafe maths sets flush-to-zero in the calling thread: NumPy
    # itself would lose its subnormals. Contraction to FMA changes argmin and comparisons near ties.
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_floating_point_contract_flag": "off",
}


class _Refused(Exception):
    """Why the compiled function may not serve; its text goes to the report."""


class _WriteableAlias:
    """The memory of a read-only array as a writeable one: Dynamo would set the flag on the user's own array.

    Nothing writes to it: graphs that write into an argument are refused, and so are results that share its memory.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._keep_alive = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


class _Unchecked(Exception):
    """A served call met a graph that has not been compared with NumPy yet."""


# ----------------------------------------------------------------------------------------------- the report


@dataclass(frozen=True, kw_only=True)
class NumpyReport:
    """What the check of one kind of call found. ``str(report)`` is a paragraph for people."""

    function: str
    status: Literal["unmeasured", "compiled", "original"]
    """Which function serves calls of this kind."""
    reason: str
    signature: str = ""
    speedup: float | None = None
    """Median over rounds of time of the original / time of the best candidate, also when it lost."""
    speedup_interval: tuple[float, float] | None = None
    """95% bootstrap interval of ``speedup``; None with fewer than three rounds."""
    numpy_ms: float | None = None
    compiled_ms: float | None = None
    rounds: int = 0
    threads: int | None = None
    """Threads of the best compiled candidate."""
    float64_default: bool = False
    """True if it had to be traced with float64 as torch's default dtype to agree (int / int, say)."""
    compile_seconds: float = 0.0
    graphs: int = 0
    graph_breaks: int = 0
    break_reasons: tuple[str, ...] = ()
    dtype_differences: tuple[str, ...] = ()
    """Where a candidate returned another dtype than NumPy: such a candidate never serves."""
    max_relative_error: float | None = None
    """Largest |compiled - NumPy| over the largest |NumPy| of the same result."""
    edge_differences: tuple[str, ...] = ()
    """Where the function leaves NumPy on values that the first call did not hold (NaN, infinity, zero, negative);
    a notice, except under ``strict``."""
    candidates: tuple[str, ...] = ()
    rechecks: int = 0
    """Guard misses after the first call, each compared with NumPy before it was allowed to serve."""

    def __str__(self) -> str:
        lines = [f"{self.function}{self.signature}: {self.status} serves: {self.reason}"]
        if self.speedup is not None:
            span = "" if self.speedup_interval is None else " [{:.2f}, {:.2f}]".format(*self.speedup_interval)
            lines.append(
                f"  speed-up {self.speedup:.2f}x{span}: NumPy {self.numpy_ms:.3f} ms, compiled"
                f" {self.compiled_ms:.3f} ms on {self.threads} thread(s), {self.rounds} paired round(s)"
            )
        if self.compile_seconds:
            lines.append(
                f"  compiled in {self.compile_seconds:.1f} s; {self.graphs} graph(s),"
                f" {self.graph_breaks} graph break(s), {self.rechecks} recheck(s)"
            )
        lines += [f"  break: {text}" for text in self.break_reasons]
        lines += [f"  dtype: {text}" for text in self.dtype_differences]
        if self.max_relative_error is not None:
            lines.append(f"  largest relative error {self.max_relative_error:.1e}")
        lines += [f"  edge values: {text}" for text in self.edge_differences]
        lines += [f"  candidate: {text}" for text in self.candidates]
        return "\n".join(lines)


# --------------------------------------------------------------------------- arguments: key and preparation


@dataclass(slots=True)
class _Call:
    """The arguments of one call: as given, as the compiled function takes them, and what they are."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: tuple[Any, ...] = ()
    arrays: list[np.ndarray] = field(default_factory=list)
    prepared_args: tuple[Any, ...] = ()
    prepared_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def describe(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Raises _Refused for an argument that torch cannot take with NumPy's meaning."""
        call = cls(args, kwargs)
        parts: list[Any] = []
        call.prepared_args = tuple(_prepare(value, parts, call.arrays) for value in args)
        for name in kwargs:
            parts.append(name)
            call.prepared_kwargs[name] = _prepare(kwargs[name], parts, call.arrays)
        elements = sum(array.size for array in call.arrays)
        parts.append(elements.bit_length() // 2)  # speed is judged anew when the size changes about fourfold
        call.key = tuple(parts)
        return call

    @property
    def signature(self) -> tuple[Any, ...]:
        """The key without the size class: compiled programs are shared by all sizes."""
        return self.key[:-1]

    def pretty(self) -> str:
        def show(value: Any) -> str:
            if isinstance(value, np.ndarray):
                return f"{value.dtype}[{','.join(map(str, value.shape))}]"
            if isinstance(value, tuple | list):
                return f"{type(value).__name__}({', '.join(map(show, value))})"
            if isinstance(value, dict):
                return "{" + ", ".join(f"{k!r}: {show(v)}" for k, v in value.items()) + "}"
            return type(value).__name__ if isinstance(value, np.generic) else repr(value)

        shown = [show(value) for value in self.args] + [f"{k}={show(v)}" for k, v in self.kwargs.items()]
        return f"({', '.join(shown)})"


def _prepare(value: Any, parts: list[Any], arrays: list[np.ndarray]) -> Any:
    """Append what ``value`` is to ``parts`` and its arrays to ``arrays``; return what to hand to torch."""
    kind = type(value)
    if kind is np.ndarray:
        _require_dtype(value.dtype)
        parts.append((value.dtype, value.ndim, value.flags.writeable))
        arrays.append(value)
        if not value.flags.c_contiguous and any(
            stride < 0 or stride % value.itemsize for stride in value.strides
        ):
            return value.copy()  # torch has no negative or odd strides; nothing that serves writes into it
        return value if value.flags.writeable else np.asarray(_WriteableAlias(value))
    if isinstance(value, np.generic):
        _require_dtype(value.dtype)
        parts.append(("scalar", value.dtype))
        return value
    if kind in (int, float, complex):
        parts.append(kind)
        return value
    if value is None or kind in (bool, str, bytes) or isinstance(value, np.dtype | type):
        parts.append((kind, value))
        return value
    if kind in (tuple, list):
        parts.append((kind, len(value)))
        return kind([_prepare(item, parts, arrays) for item in value])
    if kind is dict:
        parts.append((kind, tuple(value)))
        return {name: _prepare(item, parts, arrays) for name, item in value.items()}
    raise _Refused(f"an argument is a {kind.__module__}.{kind.__qualname__}, neither array nor plain data")


def _require_dtype(dtype: np.dtype) -> None:
    if dtype.kind not in "biufc" or not dtype.isnative or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise _Refused(f"dtype {dtype.str} has no torch counterpart")


def _map_arrays(value: Any, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([_map_arrays(item, change) for item in value])
    if type(value) is dict:
        return {name: _map_arrays(item, change) for name, item in value.items()}
    return value


def _strew(array: np.ndarray, *, floats: tuple[float, ...], integers: tuple[int, ...]) -> np.ndarray:
    """A copy with special values at about every fifth place."""
    values = {"f": floats, "c": floats, "i": integers}.get(array.dtype.kind)
    if values is None or not array.size:
        return array
    copy = array.copy(order="K")
    for index, value in enumerate(values):
        copy.flat[index :: 5 * len(values)] = value
    return copy


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and np.array_equal(
            np.ascontiguousarray(a).reshape(-1).view(np.uint8),
            np.ascontiguousarray(b).reshape(-1).view(np.uint8),
        )
    )


# -------------------------------------------------------------------------------------- results: comparison

_Path = tuple[Any, ...]


def _leaves(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    if isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, (*path, name))
    else:
        yield path, value


def _to_numpy(value: Any, arrays_0d: frozenset[_Path], path: _Path = ()) -> Any:
    """Give NumPy's types to a compiled result: torch returns 0-d arrays where NumPy returns scalars."""
    if isinstance(value, np.ndarray):
        return value[()] if value.ndim == 0 and path not in arrays_0d else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_numpy(item, arrays_0d, (*path, index)) for index, item in enumerate(value)))
    if isinstance(value, tuple | list):
        return type(value)(_to_numpy(item, arrays_0d, (*path, index)) for index, item in enumerate(value))
    if isinstance(value, dict):
        return {name: _to_numpy(item, arrays_0d, (*path, name)) for name, item in value.items()}
    return value


def _structure(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value), tuple(_structure(item) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((name, _structure(item)) for name, item in value.items())
    return type(value)


def _place(path: _Path) -> str:
    return "result" + "".join(f"[{step!r}]" for step in path)


@dataclass
class _Comparison:
    problems: list[str] = field(default_factory=list)
    dtype_differences: list[str] = field(default_factory=list)
    outside: list[_Path] = field(default_factory=list)
    """Floating-point results outside the tolerance, before the wider precision was asked."""
    error: float = 0.0


def _compare(reference: Any, result: Any, rtol: float | None, atol: float | None) -> _Comparison:
    found = _Comparison()
    if _structure(reference) != _structure(result):
        found.problems.append(
            f"NumPy returned {_type_text(reference)}, the compiled function {_type_text(result)}"
        )
    for (path, ref), (_, out) in zip(_leaves(reference), _leaves(result), strict=False):
        if all(isinstance(leaf, np.ndarray | np.generic | float) for leaf in (ref, out)):
            _compare_array(path, np.asarray(ref), np.asarray(out), rtol, atol, found)
        elif type(ref) is not type(out) or not (ref is out or ref == out):
            found.problems.append(f"{_place(path)}: NumPy {ref!r}, compiled {out!r}")
    return found


def _type_text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of ({', '.join(_type_text(item) for item in value)})"
    return type(value).__name__


def _compare_array(
    path: _Path, ref: np.ndarray, out: np.ndarray, rtol: float | None, atol: float | None, found: _Comparison
) -> None:
    if ref.dtype != out.dtype:
        found.dtype_differences.append(f"{_place(path)}: NumPy {ref.dtype}, compiled {out.dtype}")
        return
    if ref.shape != out.shape:
        found.problems.append(f"{_place(path)}: NumPy has shape {ref.shape}, compiled {out.shape}")
        return
    if ref.dtype.kind not in "fc":
        differing = int(np.count_nonzero(ref != out))
        if differing:
            found.problems.append(f"{_place(path)}: {differing:,} of {ref.size:,} {ref.dtype} values differ")
        return
    if ref.dtype.kind == "c":  # the parts, so that NaN and infinity are compared in each
        for part in ("real", "imag"):
            _compare_array((*path, part), getattr(ref, part), getattr(out, part), rtol, atol, found)
        return
    special = ~np.isfinite(ref)
    if not np.array_equal(ref[special], out[special], equal_nan=True) or not np.isfinite(out[~special]).all():
        found.problems.append(f"{_place(path)}: NaN or infinity in other places than NumPy's")
        return
    ref, out = ref[~special], out[~special]
    if not ref.size:
        return
    wide = np.promote_types(ref.dtype, np.float64)
    difference = np.abs(out.astype(wide) - ref.astype(wide))
    largest = float(np.abs(ref).max())
    worst = float(difference.max())
    found.error = max(found.error, worst / largest if largest else worst)
    relative = RTOL[ref.dtype.name] if rtol is None else rtol
    absolute = ATOL_EPS * float(np.finfo(ref.dtype).eps) * largest if atol is None else atol
    if (difference > absolute + relative * np.abs(ref)).any():
        found.outside.append(path)
        found.problems.append(f"{_place(path)}: off by up to {worst:.3g} (largest value {largest:.3g})")


def _no_less_accurate(call: _Call, fn: Callable, reference: Any, result: Any, paths: list[_Path]) -> bool:
    """Whether ``result`` is about as near as NumPy's to the function in the next wider precision."""
    wider = {"f2": "f4", "f4": "f8", "f8": "g", "c8": "c16", "c16": "G"}

    def widen(array: np.ndarray) -> np.ndarray:
        code = wider.get(array.dtype.str[1:])
        return array if code is None else array.astype(code)

    if not any(array.dtype.str[1:] in wider for array in call.arrays):
        return False  # nothing to widen
    try:
        with np.errstate(all="ignore"):
            args, kwargs = _map_arrays(call.args, widen), _map_arrays(call.kwargs, widen)
            exact = dict(_leaves(fn(*args, **kwargs)))
    except Exception:  # a function that does not run in the wider precision settles nothing
        return False
    refs, outs = dict(_leaves(reference)), dict(_leaves(result))
    for path in paths:
        where, part = (path[:-1], path[-1]) if path and path[-1] in ("real", "imag") else (path, None)
        if any(where not in leaves for leaves in (exact, refs, outs)):
            return False
        best, ref, out = (np.asarray(leaves[where]) for leaves in (exact, refs, outs))
        if part is not None:
            best, ref, out = (getattr(array, part) for array in (best, ref, out))
        if best.shape != ref.shape or best.dtype.kind not in "fc" or best.dtype.itemsize < ref.dtype.itemsize:
            return False
        finite = np.isfinite(ref) & np.isfinite(best)
        ref_error = np.abs(ref[finite] - best[finite]).max(initial=0)
        if np.abs(out[finite] - best[finite]).max(initial=0) > WIDER_FACTOR * ref_error:
            return False
    return True


# ------------------------------------------------------------------------------------- a compiled candidate


@dataclass(frozen=True)
class _Variant:
    threads: int
    float64_default: bool = False
    dynamic_outputs: bool = False
    """Trace operators whose output shape depends on data (boolean indexing) instead of breaking the graph."""

    def __str__(self) -> str:
        extra = [", float64 default"] * self.float64_default + [", dynamic outputs"] * self.dynamic_outputs
        return f"{self.threads} thread(s)" + "".join(extra)


class _Program:
    """One variant of ``fn``, compiled on its own copy of the code so that Dynamo's caches are not shared."""

    def __init__(self, fn: Callable, variant: _Variant, device: str, dynamic: bool | None) -> None:
        self.variant = variant
        self.device = device
        self.graphs = 0
        self.breaks: dict[str, int] = {}
        self.compile_seconds = 0.0
        self.arrays_0d: frozenset[_Path] = frozenset()
        self._scalars: frozenset[_Path] = frozenset()
        self._refusal: str | None = None
        self._checking: int | None = None
        self._compiled = torch.compile(_private_copy(fn), backend=self._backend, dynamic=dynamic)

    def _backend(self, graph: Any, example_inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        if self._checking != threading.get_ident():
            raise _Unchecked
        self.graphs += 1
        return compile_fx(graph, example_inputs, inner_compile=self._inner_compile)

    def _inner_compile(self, graph: Any, example_inputs: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        for node in graph.graph.nodes:
            writes = node.op == "call_function" and node.target is torch.ops.aten.copy_.default
            if writes and node.args[0].op == "placeholder":
                self._refusal = "it writes into an argument"
                raise _Refused(self._refusal)
        return compile_fx_inner(graph, example_inputs, **options)

    def check(self, call: _Call) -> Any:
        """Run with compilation allowed; raises _Refused with the reason if torch cannot run it."""
        import torch._dynamo.config as dynamo_config
        import torch._functorch.config as functorch_config
        import torch._inductor.config as inductor_config
        from torch._dynamo.utils import counters

        before = dict(counters["graph_break"])
        graphs = self.graphs
        started = time.perf_counter()
        self._checking = threading.get_ident()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                threads = {"cpp.threads": self.variant.threads}
                stack.enter_context(inductor_config.patch({**_SAFE_INDUCTOR, **threads}))
                # A hit in this cache would skip the look at the graph for writes into arguments.
                stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
                outputs = {"capture_dynamic_output_shape_ops": self.variant.dynamic_outputs}
                stack.enter_context(dynamo_config.patch({"suppress_errors": False, **outputs}))
                result = self._run(call)
        except Exception as error:
            reason = self._refusal or f"torch could not trace or run it: {_first_line(error)}"
            raise _Refused(reason) from error
        finally:
            self._checking = None
            if self.graphs > graphs:
                self.compile_seconds += time.perf_counter() - started
        for text, count in counters["graph_break"].items():
            if count > before.get(text, 0):
                self.breaks[text] = self.breaks.get(text, 0) + count - before.get(text, 0)
        if not self.graphs:
            why = f": {_first_line(next(iter(self.breaks)))}" if self.breaks else ""
            raise _Refused(f"torch found no array operation to compile{why}")
        return result

    def learn_scalars(self, reference: Any) -> None:
        """Note where NumPy returned 0-d arrays rather than scalars: the two cannot be kept apart later."""
        leaves = list(_leaves(reference))
        self.arrays_0d |= {path for path, leaf in leaves if isinstance(leaf, np.ndarray) and leaf.ndim == 0}
        self._scalars |= {path for path, leaf in leaves if isinstance(leaf, np.generic)}
        if self.arrays_0d & self._scalars:
            raise _Refused("it returns a 0-d array or a scalar at the same place, depending on the call")

    def serve(self, call: _Call) -> Any:
        """Run checked graphs only: anything that needs a new one raises, before it has had an effect."""
        return _to_numpy(self._run(call), self.arrays_0d)

    def _run(self, call: _Call) -> Any:
        with contextlib.ExitStack() as stack:
            if torch.get_num_threads() != self.variant.threads:
                stack.enter_context(_num_threads(self.variant.threads))
            if self.variant.float64_default and torch.get_default_dtype() != torch.float64:
                stack.enter_context(_default_float64())
            if self.device != "cpu":
                stack.enter_context(torch.device(self.device))
            stack.enter_context(torch.no_grad())
            return self._compiled(*call.prepared_args, **call.prepared_kwargs)


def _private_copy(fn: Callable) -> Callable:
    if not isinstance(fn, types.FunctionType):

        def fn_of_callable(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return _private_copy(fn_of_callable)
    code = fn.__code__.replace(co_name=f"{fn.__code__.co_name}__tw{next(_SERIAL)}")
    copy = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def _first_line(error: object) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


@contextlib.contextmanager
def _num_threads(count: int) -> Iterator[None]:
    with _THREADS_LOCK:  # so that a second Python thread does not save, and restore, our number
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@contextlib.contextmanager
def _default_float64() -> Iterator[None]:
    with _THREADS_LOCK:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


# ---------------------------------------------------------------------------------------------- the wrapper


@dataclass(slots=True)
class _Decision:
    report: NumpyReport
    program: _Program | None = None
    rechecks: int = 0


class CompiledNumpy:
    """A NumPy function that is served by compiled code where that agrees with NumPy and is faster.

    Call it as the function it wraps. ``report`` tells what the last check found, ``reports`` tell all.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        threads: int | None,
        device: str,
        rtol: float | None,
        atol: float | None,
        dynamic: bool | None,
        strict: bool,
        measure: bool,
        measure_seconds: float,
    ) -> None:
        self.__name__ = type(fn).__name__
        functools.update_wrapper(self, fn)
        self.__wrapped__ = fn
        self.threads = threads
        self.device = device
        self.rtol = rtol
        self.atol = atol
        self.dynamic = dynamic
        self.strict = strict
        self.measure = measure
        self.measure_seconds = measure_seconds
        self._name = self.__name__
        self._lock = threading.RLock()
        self._decisions: dict[tuple[Any, ...], _Decision] = {}
        self._programs: dict[tuple[tuple[Any, ...], _Variant], _Program] = {}
        self._report = NumpyReport(function=self._name, status="unmeasured", reason="not called yet")
        self._side_effect = _outside_store(fn)

    @property
    def report(self) -> NumpyReport:
        """What the latest check found: the first call of each kind, a guard miss, or a refusal."""
        return self._report

    @property
    def reports(self) -> tuple[NumpyReport, ...]:
        """One report for each kind of call seen (structure, dtypes, ranks, size class)."""
        return tuple(decision.report for decision in self._decisions.values())

    def __repr__(self) -> str:
        return f"<CompiledNumpy {self._name}: {self._report.status}>"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # called from a function that is itself being traced
            return self.__wrapped__(*args, **kwargs)
        try:
            call = _Call.describe(args, kwargs)
        except _Refused as refusal:
            reason = str(refusal)
        else:
            return self._dispatch(call)
        result = self.__wrapped__(*args, **kwargs)  # outside the handler: its errors must not mention ours
        self._refuse(reason)
        return result

    def _dispatch(self, call: _Call) -> Any:
        decision = self._decisions.get(call.key)
        if decision is None:
            with self._lock:
                decision = self._decisions.get(call.key)
                if decision is None:
                    return self._first_call(call)
        if decision.program is None or _numpy_errors_are_trapped():
            return self.__wrapped__(*call.args, **call.kwargs)
        try:
            return decision.program.serve(call)
        except Exception as error:
            failure = error
        return self._after_failure(decision, call, failure)

    # -- the check

    def _first_call(self, call: _Call) -> Any:
        reference, seconds, refusal = self._run_original(call)
        if _numpy_errors_are_trapped():
            return reference  # compiled code raises no floating-point errors: judge on a call without traps
        base = NumpyReport(function=self._name, status="original", reason="", signature=call.pretty())
        floor = CALL_FLOOR_SECONDS
        if refusal is None and self.measure and seconds < 10 * floor:
            seconds = min(seconds, *(self._time_original(call) for _ in range(3)))
            if seconds < floor:
                reason = f"NumPy takes {seconds * 1e6:.1f} us, a compiled call at least {floor * 1e6:.0f} us"
                base = replace(base, reason=reason, numpy_ms=seconds * 1e3)
                return self._decide(call, base, None, reference)
        if refusal is not None:
            return self._decide(call, replace(base, reason=refusal), None, reference, cannot=True)

        threads = 1 if self.device != "cpu" else self.threads or torch.get_num_threads()
        agreeing, tried = self._explore(call, reference, threads)
        attempt = agreeing[0] if agreeing else tried[0]
        base = replace(
            base,
            compile_seconds=sum(one.program.compile_seconds for one in tried),
            graphs=attempt.program.graphs,
            graph_breaks=sum(attempt.program.breaks.values()),
            break_reasons=tuple(_first_line(text) for text in attempt.program.breaks),
            dtype_differences=tuple(tried[0].comparison.dtype_differences),
            threads=threads,
            max_relative_error=max((one.comparison.error for one in agreeing), default=None),
            float64_default=attempt.program.variant.float64_default,
            candidates=tuple(f"{one.program.variant}: {one.refusal or 'agrees with NumPy'}" for one in tried),
        )
        if not agreeing:
            base = replace(base, reason=attempt.refusal or "")
            return self._decide(call, base, None, reference, cannot=True)
        base = replace(base, edge_differences=self._edge_differences(call, attempt.program, seconds))
        if base.edge_differences:
            self._raise_if_strict(base.edge_differences[0])
        if not self.measure:
            base = replace(base, status="compiled", reason="agrees with NumPy; not timed (measure=False)")
            return self._decide(call, base, agreeing[0].program, reference)
        report, program = self._time(call, base, [one.program for one in agreeing], seconds)
        return self._decide(call, report, program, reference)

    def _run_original(self, call: _Call) -> tuple[Any, float, str | None]:
        """The original on the real arguments: its result, its time, and a reason not to compile, if any."""
        pristine = [array.copy() for array in call.arrays]
        drawn = np.random.get_state(legacy=False)
        started = time.perf_counter()
        reference = self.__wrapped__(*call.args, **call.kwargs)
        seconds = time.perf_counter() - started
        if not all(map(_same_bytes, call.arrays, pristine)):
            return reference, seconds, "it writes into an argument"
        if self._side_effect is not None:
            return reference, seconds, self._side_effect
        now = np.random.get_state(legacy=False)
        if str(drawn) != str(now) or not np.array_equal(drawn["state"].get("key"), now["state"].get("key")):
            return reference, seconds, "it draws from np.random, whose stream compiled code does not follow"
        return reference, seconds, None

    def _explore(self, call: _Call, reference: Any, threads: int) -> tuple[list[_Attempt], list[_Attempt]]:
        """Candidates that agree, and all that were tried, in order. Further ones only where they can help."""
        tried = [self._attempt(call, reference, _Variant(threads))]
        if tried[0].program.graphs and (tried[0].comparison.dtype_differences or tried[0].comparison.outside):
            tried.append(self._attempt(call, reference, _Variant(threads, float64_default=True)))
        elif tried[0].program.breaks:
            tried.append(self._attempt(call, reference, _Variant(threads, dynamic_outputs=True)))
        agreeing = [one for one in tried if one.refusal is None]
        if agreeing and threads > 1 and self.measure:
            tried.append(self._attempt(call, reference, replace(agreeing[-1].program.variant, threads=1)))
            agreeing = [one for one in tried if one.refusal is None]
        return agreeing, tried

    def _attempt(self, call: _Call, reference: Any, variant: _Variant) -> _Attempt:
        slot = (call.signature, variant)
        if slot not in self._programs:
            self._programs[slot] = _Program(self.__wrapped__, variant, self.device, self.dynamic)
        attempt = _Attempt(self._programs[slot])
        try:
            self._verify(call, reference, attempt)
        except _Refused as refusal:
            attempt.refusal = str(refusal)
        return attempt

    def _verify(self, call: _Call, reference: Any, attempt: _Attempt) -> None:
        """Raises _Refused unless the program returns what NumPy returned, twice, in memory of its own."""
        program = attempt.program
        program.learn_scalars(reference)
        results = [_to_numpy(program.check(call), program.arrays_0d) for _ in range(2)]
        for result in results:
            attempt.comparison = found = _compare(reference, result, self.rtol, self.atol)
            if found.dtype_differences:
                raise _Refused(f"another dtype than NumPy: {found.dtype_differences[0]}")
            if found.problems and (
                len(found.outside) < len(found.problems)
                or not _no_less_accurate(call, self.__wrapped__, reference, result, found.outside)
            ):
                raise _Refused(f"disagrees with NumPy: {found.problems[0]}")
        _require_own_memory(call, reference, *results)

    def _edge_differences(self, call: _Call, program: _Program, seconds: float) -> tuple[str, ...]:
        """Compare on copies of the arguments with special values strewn in.

        Left out where it could take long: a slow function, or one with graph breaks, which may loop on its data.
        """
        if program.breaks or seconds > self.measure_seconds:
            return ()
        differences = []
        for name, floats, integers in (
            ("with NaN, infinity and integer zeros", (np.nan, np.inf, -np.inf), (0,)),
            ("with zeros and negative values", (0.0, -1.5), (-1, -2)),
        ):
            args, kwargs = (
                _map_arrays(given, functools.partial(_strew, floats=floats, integers=integers))
                for given in (call.args, call.kwargs)
            )
            problem = self._edge_difference(_Call.describe(args, kwargs), program)
            if problem:
                differences.append(f"{name}: {problem}")
        return tuple(differences)

    def _edge_difference(self, call: _Call, program: _Program) -> str | None:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                result = program.serve(call)
            except Exception:  # a served call would go to NumPy
                return None
            try:
                reference = self.__wrapped__(*call.args, **call.kwargs)
            except Exception as error:
                return f"NumPy raises {type(error).__name__} ({_first_line(error)}), compiled code does not"
        found = _compare(reference, result, self.rtol, self.atol)
        rounding = len(found.outside)  # near special values only the special ones are judged
        return next(iter(found.problems), None) if len(found.problems) > rounding else None

    def _time_original(self, call: _Call) -> float:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            started = time.perf_counter()
            self.__wrapped__(*call.args, **call.kwargs)
            return time.perf_counter() - started

    def _time(
        self, call: _Call, base: NumpyReport, programs: list[_Program], seconds: float
    ) -> tuple[NumpyReport, _Program | None]:
        """Original and candidates in turn; the best candidate serves if its interval lies above 1."""

        def served(program: _Program) -> float:
            started = time.perf_counter()
            fresh = _Call.describe(call.args, call.kwargs)
            program.serve(fresh)
            return time.perf_counter() - started

        once = [served(program) for program in programs]
        rounds = int(self.measure_seconds / (seconds + sum(once)))
        if rounds < 3:  # too dear to repeat: the runs of the check are the only sample
            originals, samples = [seconds], [[value] for value in once]
        else:
            originals, samples = [], [[] for _ in programs]
            for _ in range(min(rounds, MAX_ROUNDS)):
                originals.append(self._time_original(call))
                for sample, program in zip(samples, programs, strict=True):
                    sample.append(served(program))
        best = min(range(len(programs)), key=lambda index: statistics.median(samples[index]))
        ratios = np.array(originals) / np.array(samples[best])
        speedup, interval = float(np.median(ratios)), _interval(ratios)
        report = replace(
            base,
            speedup=speedup,
            speedup_interval=interval,
            numpy_ms=statistics.median(originals) * 1e3,
            compiled_ms=statistics.median(samples[best]) * 1e3,
            rounds=len(originals),
            threads=programs[best].variant.threads,
            candidates=tuple(
                f"{program.variant}: {statistics.median(sample) * 1e3:.3f} ms"
                for program, sample in zip(programs, samples, strict=True)
            )
            + tuple(text for text in base.candidates if not text.endswith("agrees with NumPy")),
        )
        # A single round has no interval: ask for a gain that noise does not make.
        if (interval[0] if interval else speedup / 1.2) > 1:
            report = replace(report, status="compiled", reason="agrees with NumPy and is faster")
            return report, programs[best]
        return replace(report, reason="agrees with NumPy, but compiling does not make it faster"), None

    # -- decisions

    def _decide(
        self,
        call: _Call,
        report: NumpyReport,
        program: _Program | None,
        reference: Any,
        *,
        cannot: bool = False,
    ) -> Any:
        if cannot:
            self._raise_if_strict(report.reason)
        self._decisions[call.key] = _Decision(report, program)
        self._report = report
        return reference

    def _refuse(self, reason: str) -> None:
        self._raise_if_strict(reason)
        self._report = NumpyReport(function=self._name, status="original", reason=reason)

    def _raise_if_strict(self, reason: str) -> None:
        if self.strict:
            raise TorchwrightError(
                f"{self._name} cannot be served by compiled code",
                found=reason,
                allowed="a pure function of arrays and plain data, with NumPy's results when traced",
                next="drop strict=True to let the original serve, or rewrite the part that is named",
            )

    def _demote(self, decision: _Decision, reason: str) -> None:
        decision.program = None
        self._report = decision.report = replace(
            decision.report, status="original", reason=reason, rechecks=decision.rechecks
        )

    def _after_failure(self, decision: _Decision, call: _Call, error: Exception) -> Any:
        """A served call raised. Nothing was written, so NumPy can be asked; users see its errors."""
        program = decision.program
        if program is not None and _caused_by(error, _Unchecked):
            with self._lock:
                return self._recheck(decision, program, call)
        result = self.__wrapped__(*call.args, **call.kwargs)
        self._demote(decision, f"compiled code raised where NumPy did not: {_first_line(error)}")
        self._raise_if_strict(decision.report.reason)
        return result

    def _recheck(self, decision: _Decision, program: _Program, call: _Call) -> Any:
        reference, _, refusal = self._run_original(call)
        decision.rechecks += 1
        if decision.rechecks > MAX_RECHECKS:
            refusal = (
                f"recompile storm: {decision.rechecks} guard misses; keep Python values and shapes steadier,"
                " pass scalars as 0-d arrays, or try dynamic=True"
            )
        if refusal is None:
            attempt = _Attempt(program)
            try:
                self._verify(call, reference, attempt)
            except _Refused as found:
                refusal = str(found)
        if refusal is not None:
            self._demote(decision, refusal)
            self._raise_if_strict(refusal)
            return reference
        self._report = decision.report = replace(
            decision.report,
            rechecks=decision.rechecks,
            graphs=program.graphs,
            graph_breaks=sum(program.breaks.values()),
            compile_seconds=program.compile_seconds,
        )
        return reference


@dataclass
class _Attempt:
    program: _Program
    comparison: _Comparison = field(default_factory=_Comparison)
    refusal: str | None = None


def _require_own_memory(call: _Call, reference: Any, first: Any, second: Any) -> None:
    """Where NumPy returned new memory, compiled code must too: a later write must not reach anything else."""

    def arrays(value: Any) -> list[np.ndarray]:
        return [leaf for _, leaf in _leaves(value) if isinstance(leaf, np.ndarray)]

    refs, outs, others = arrays(reference), arrays(first), arrays(second)
    for index, (ref, out) in enumerate(zip(refs, outs, strict=True)):
        for given in call.arrays:
            if np.may_share_memory(out, given) and (
                not given.flags.writeable or not np.may_share_memory(ref, given)
            ):
                raise _Refused("the compiled function returns a view of an argument where NumPy does not")
        if any(np.may_share_memory(out, other) for other in others) and not any(
            np.may_share_memory(out, given) for given in call.arrays
        ):
            raise _Refused("the compiled function returns the same memory on every call")
        for ref_later, out_later in zip(refs[index + 1 :], outs[index + 1 :], strict=True):
            if np.may_share_memory(out, out_later) and not np.may_share_memory(ref, ref_later):
                raise _Refused("the compiled function returns two results in the same memory")


def _outside_store(fn: Callable) -> str | None:
    """A write to a global or enclosing name in ``fn``'s own code: running it several times would show."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return f"it assigns the global {instruction.argval!r}"
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars:
            return f"it assigns {instruction.argval!r} of an enclosing function"
    return None


def _numpy_errors_are_trapped() -> bool:
    modes = np.geterr().values()
    return not all(mode in ("warn", "ignore") for mode in modes)


def _caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind) or isinstance(getattr(error, "inner_exception", None), kind):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _interval(ratios: np.ndarray) -> tuple[float, float] | None:
    """95% bootstrap interval of the median; None below three samples."""
    if len(ratios) < 3:
        return None
    picks = np.random.default_rng(0).integers(0, len(ratios), (1000, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), (0.025, 0.975))
    return float(low), float(high)


class _Options(TypedDict, total=False):
    threads: int | None
    device: str
    rtol: float | None
    atol: float | None
    dynamic: bool | None
    strict: bool
    measure: bool
    measure_seconds: float


@overload
def compile_numpy(fn: Callable[..., Any], **options: Unpack[_Options]) -> CompiledNumpy: ...
@overload
def compile_numpy(
    fn: None = None, **options: Unpack[_Options]
) -> Callable[[Callable[..., Any]], CompiledNumpy]: ...
def compile_numpy(
    fn: Callable[..., Any] | None = None,
    *,
    threads: int | None = None,
    device: str = "cpu",
    rtol: float | None = None,
    atol: float | None = None,
    dynamic: bool | None = None,
    strict: bool = False,
    measure: bool = True,
    measure_seconds: float = 2.0,
) -> Any:
    """Compile a pure NumPy function, check it against NumPy, and serve whichever is faster.

    ``fn`` takes arrays, scalars and plain Python data (nested in tuples, lists, dicts) and returns the same.
    On the first call of each kind it runs several times, so it must be pure; one that writes into its
    arguments, assigns outer names or draws from ``np.random`` is recognised and stays with NumPy.

    threads: most threads to use; default ``torch.get_num_threads()``. One thread is always tried too.
    device: "cpu", or a torch device such as "cuda" on which the compiled function runs (results come back).
    rtol, atol: tolerance for floating-point results; defaults by dtype, see ``RTOL`` and ``ATOL_EPS``.
    dynamic: as for ``torch.compile``: True traces symbolic shapes from the start, False never.
    strict: raise TorchwrightError where the original would have to serve for any reason but speed.
    measure: False serves compiled code wherever it agrees, without timing it.
    measure_seconds: most time to spend on timing in one first call.

    Raises TorchwrightError for options that are out of range or a device that is not there. Whatever ``fn``
    raises is raised unchanged. Source: NumPy support in Dynamo (https://pytorch.org/blog/compiling-numpy-code/).
    """
    if fn is None:
        options = {"rtol": rtol, "atol": atol, "dynamic": dynamic, "strict": strict, "measure": measure}
        return functools.partial(
            compile_numpy, threads=threads, device=device, measure_seconds=measure_seconds, **options
        )
    if not callable(fn):
        raise TorchwrightError(
            "compile_numpy needs a function",
            found=repr(fn),
            allowed="a callable",
            next="@compile_numpy above a def",
        )
    for name, value, low in (("threads", threads, 1), ("rtol", rtol, 0), ("atol", atol, 0)):
        if value is not None and not value >= low:
            raise TorchwrightError(
                f"compile_numpy: {name} is out of range", found=repr(value), allowed=f"None or at least {low}"
            )
    if not measure_seconds >= 0:
        raise TorchwrightError(
            "compile_numpy: measure_seconds is out of range", found=f"{measure_seconds}", allowed="at least 0"
        )
    _require_device(device)
    return CompiledNumpy(
        fn,
        threads=threads,
        device=device,
        rtol=rtol,
        atol=atol,
        dynamic=dynamic,
        strict=strict,
        measure=measure,
        measure_seconds=measure_seconds,
    )


def _require_device(device: str) -> None:
    if device == "cpu":
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    if device.split(":")[0] not in here:
        allowed = " or ".join(here)
        raise TorchwrightError(f"compile_numpy: device {device!r} is not available here", allowed=allowed)
