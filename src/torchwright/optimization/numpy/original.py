"""Running the original: its result, its time, and whether it is pure enough to be compiled."""

from __future__ import annotations

import dis
import inspect
import pickle
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchwright.optimization.numpy.call import ArrayCall


@dataclass(frozen=True)
class Original:
    """The original's run on the caller's own arguments."""

    result: Any
    seconds: float
    refusal: str | None
    """Why the function must not be compiled, or None."""


def run_original(fn: Callable, call: ArrayCall) -> Original:
    """Run ``fn`` once on the real arguments, watching for side effects."""
    pristine = [array.copy() for array in call.arrays]
    drawn = _random_states(fn)
    started = time.perf_counter()
    result = fn(*call.args, **call.kwargs)
    seconds = time.perf_counter() - started
    refusal = _outside_store(fn)
    if not all(map(_same_bytes, call.arrays, pristine)):
        refusal = "it writes into an argument"
    elif drawn != _random_states(fn):
        refusal = refusal or "it draws from np.random, whose stream compiled code does not follow"
    return Original(result, seconds, refusal)


def time_original(fn: Callable, call: ArrayCall) -> float:
    """Seconds of one more run, without its warnings."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        started = time.perf_counter()
        fn(*call.args, **call.kwargs)
        return time.perf_counter() - started


def numpy_errors_are_trapped() -> bool:
    """Check whether NumPy would raise, or call back, where compiled code does nothing."""
    return not set(np.geterr().values()) <= {"warn", "ignore"}


def _random_states(fn: Callable) -> list[bytes]:
    """The states of np.random and of the generators that ``fn`` reads as globals or enclosing names."""
    inner = inspect.unwrap(fn)
    code = getattr(inner, "__code__", None)
    outer: list[Any] = []
    if code is not None:
        outer = [inner.__globals__.get(name) for name in code.co_names]
        outer += [value for _, value in sorted(inspect.getclosurevars(inner).nonlocals.items())]
    states = [pickle.dumps(np.random.get_state())]
    for generator in outer:
        if isinstance(generator, np.random.Generator | np.random.RandomState):
            states.append(pickle.dumps(generator))
    return states


def _outside_store(fn: Callable) -> str | None:
    """A write to a global or enclosing name in ``fn``'s own code: running it several times would show."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None:
        return None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return f"it assigns the global {instruction.argval!r}"
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars:
            return f"it assigns {instruction.argval!r} of an enclosing function"
    return None


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
