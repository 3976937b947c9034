"""One compiled form of a NumPy function."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchwright.optimization.engines.compiled.compiler_caches import use_private_caches
from torchwright.optimization.numpy import semantics
from torchwright.optimization.numpy.call import ArrayCall
from torchwright.optimization.numpy.operations import Step, steps
from torchwright.optimization.numpy.report import ProgramRefused, first_line
from torchwright.optimization.numpy.tree import Path, leaves, map_leaves

_SERIAL = itertools.count()
_SETTINGS_LOCK = threading.RLock()
"""Held while a process-wide setting is changed, so that no second Python thread saves, and restores, our value."""
SAFE_INDUCTOR = {
    # With g++ < 13, loading a kernel linked with unsafe maths sets flush-to-zero in the calling thread: NumPy
    # itself would lose its subnormals. Contraction to FMA changes argmin and comparisons near ties.
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_floating_point_contract_flag": "off",
}


MOST_OPERATIONS = 500
"""Larger graphs are left to NumPy: 300 operations took half a minute to compile and ran no faster."""
DIVISIONS = ("div.Tensor_mode", "floor_divide.default", "remainder.Tensor", "fmod.Tensor")
"""Integer divisions by non-constants: the processor's trap for a zero ends the process, on releases of torch whose
code does not check for it."""


class Unchecked(Exception):
    """A served call met a graph that has not been compared with NumPy yet."""


@dataclass(frozen=True)
class Variant:
    """Settings for compiling and running a program."""

    threads: int
    float64_default: bool = False
    dynamic_outputs: bool = False
    """Trace operators whose output shape depends on data (boolean indexing) instead of breaking the graph."""

    def __str__(self) -> str:
        extra = [", float64 default"] * self.float64_default + [", dynamic outputs"] * self.dynamic_outputs
        return f"{self.threads} thread(s)" + "".join(extra)


class Program:
    """One variant of ``fn``, compiled on its own copy of the code so that Dynamo's caches are not shared."""

    def __init__(self, fn: Callable, variant: Variant, device: str, dynamic: bool | None) -> None:
        self.variant = variant
        self.device = device
        self.graphs = 0
        self.breaks: dict[str, int] = {}
        self.compile_seconds = 0.0
        self.dtype_differences: list[str] = []
        """Operations whose results have another dtype than NumPy's."""
        self._arrays_0d: frozenset[Path] = frozenset()
        self._scalars: frozenset[Path] = frozenset()
        self._refusal: str | None = None
        self._checking: int | None = None
        """The Python thread that may compile."""
        use_private_caches()
        self._compiled = torch.compile(_private_copy(fn), backend=self._backend, dynamic=dynamic)

    def check(self, call: ArrayCall) -> Any:
        """Run with compilation allowed; raises `ProgramRefused` with the reason if torch cannot run it."""
        import torch._dynamo.config as dynamo_config
        import torch._functorch.config as functorch_config
        import torch._inductor.config as inductor_config
        from torch._dynamo.utils import counters

        # It imports Inductor, which takes long.
        from torchwright.optimization.engines.compiled.byte_reductions import exact_reductions

        before = counters["graph_break"].copy()
        graphs = self.graphs
        started = time.perf_counter()
        self._checking = threading.get_ident()
        try:
            with (
                warnings.catch_warnings(),
                inductor_config.patch(
                    {**SAFE_INDUCTOR, **exact_reductions(), "cpp.threads": self.variant.threads}
                ),
                # A hit in this cache would skip the look at the graph for writes into arguments.
                functorch_config.patch(enable_autograd_cache=False),
                dynamo_config.patch(
                    suppress_errors=False, capture_dynamic_output_shape_ops=self.variant.dynamic_outputs
                ),
            ):
                warnings.simplefilter("ignore")
                result = self.serve(call)
        except Exception as error:
            reason = self._refusal or f"torch could not trace or run it: {first_line(error)}"
            raise ProgramRefused(reason) from error
        finally:
            self._checking = None
            if self.graphs > graphs:
                self.compile_seconds += time.perf_counter() - started
        for text, count in (counters["graph_break"] - before).items():
            self.breaks[text] = self.breaks.get(text, 0) + count
        if not self.graphs:
            why = f": {first_line(next(iter(self.breaks)))}" if self.breaks else ""
            raise ProgramRefused(f"torch found no array operation to compile{why}")
        return result

    def learn_scalars(self, reference: Any) -> None:
        """Note where NumPy returned 0-d arrays rather than scalars: the two cannot be kept apart later."""
        found = list(leaves(reference))
        self._arrays_0d |= {path for path, leaf in found if isinstance(leaf, np.ndarray) and leaf.ndim == 0}
        self._scalars |= {path for path, leaf in found if isinstance(leaf, np.generic)}
        if self._arrays_0d & self._scalars:
            raise ProgramRefused(
                "it returns a 0-d array or a scalar at the same place, depending on the call"
            )

    def serve(self, call: ArrayCall) -> Any:
        """Run checked graphs only: anything that needs a new one raises, before it has had an effect."""
        with contextlib.ExitStack() as stack:
            if torch.get_num_threads() != self.variant.threads:
                stack.enter_context(
                    _setting(torch.get_num_threads, torch.set_num_threads, self.variant.threads)
                )
            if self.variant.float64_default and torch.get_default_dtype() != torch.float64:
                stack.enter_context(_setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64))
            if self.device != "cpu":
                stack.enter_context(torch.device(self.device))
            stack.enter_context(torch.no_grad())
            result = self._compiled(*call.prepared_args, **call.prepared_kwargs)
        return map_leaves(result, self._numpy_leaf)

    def _numpy_leaf(self, path: Path, leaf: Any) -> Any:
        """torch returns 0-d arrays where NumPy returns scalars."""
        scalar = isinstance(leaf, np.ndarray) and leaf.ndim == 0 and path not in self._arrays_0d
        return leaf[()] if scalar else leaf

    def _backend(self, graph: Any, example_inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        if self._checking != threading.get_ident():
            raise Unchecked
        self.graphs += 1
        if (count := len(graph.graph.nodes)) > MOST_OPERATIONS:
            self._refuse(
                f"its graph has {count} operations: a Python loop over an array's elements is unrolled"
            )
        self._require_numpys_operations(list(steps(graph.graph)))
        return compile_fx(graph, example_inputs, inner_compile=self._inner_compile)

    def _require_numpys_operations(self, found: list[Step]) -> None:
        """Refuse a graph with an operation that torch computes otherwise than NumPy, before it is compiled."""
        self.dtype_differences = [step.dtype_difference for step in found if step.dtype_difference]
        if self.dtype_differences:
            self._refuse(f"another dtype than NumPy: {self.dtype_differences[0]}")
        reason = next((step.refusal for step in found if step.refusal), "") or semantics.first_difference(
            found
        )
        if reason:
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        raise ProgramRefused(reason)

    def _inner_compile(self, graph: Any, example_inputs: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        for node in graph.graph.nodes:
            if str(node.target).removeprefix("aten.") in DIVISIONS and _may_trap(node):
                self._refuse(f"this release of torch ends the process where {node.name} divides by zero")
            writes = node.op == "call_function" and node.target is torch.ops.aten.copy_.default
            if writes and node.args[0].op == "placeholder":
                self._refuse("it writes into an argument")
        return compile_fx_inner(graph, example_inputs, **options)


def _may_trap(node: Any) -> bool:
    floating = node.meta["val"].dtype.is_floating_point
    return not floating and not looks_for_zero()


@functools.cache
def looks_for_zero() -> bool:
    """Check whether Inductor's loops on CPUs raise for integer division by zero; in our range, torch 2.11 does not."""
    from torch._inductor.codegen import cpp

    return "throw_if_integer_div_error" in inspect.getsource(cpp)


def _private_copy(fn: Callable) -> Callable:
    if not isinstance(fn, types.FunctionType):

        def fn_of_callable(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return _private_copy(fn_of_callable)
    code = fn.__code__.replace(co_name=f"{fn.__code__.co_name}__tw{next(_SERIAL)}")
    copy = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


@contextlib.contextmanager
def _setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    with _SETTINGS_LOCK:
        before = get()
        put(value)
        try:
            yield
        finally:
            put(before)
