# pyright: basic
"""Guards: the inputs that an engine answers as PyTorch does, found for a graph and checked at every call.

guards = guards_of(program, example, OpenVino.domain)      when a graph is converted
check = Check(guards)
check.before(arrays)                                       at every call: None, or the reason for the fallback
check.after(arrays)                                        the same, once the engine has read the inputs into a cache
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import fx
from torch.export import ExportedProgram

from torchwright.core.errors import RefusedTechnique
from torchwright.optimization.engines.dispatch.call_dispatcher import CompiledCall
from torchwright.optimization.engines.dispatch.integer_ranges import (
    IntegerBounds,
    IntegerRanges,
    OutOfBounds,
    TooWide,
    widest,
)
from torchwright.optimization.engines.dispatch.integer_rules import Range, operator_name
from torchwright.optimization.engines.dispatch.messages import say_slower
from torchwright.optimization.engines.dispatch.spec import CallSpec, Guard, NumberDomain, OutsideDomain

Answer = TypeVar("Answer")
LAYERS = frozenset({"linear", "addmm", "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose2d"})
ACTIVATIONS = frozenset(
    {
        "relu",
        "relu6",
        "hardtanh",
        "clamp",
        "clamp_min",
        "leaky_relu",
        "gelu",
        "hardswish",
        "hardsigmoid",
        "silu",
    }
)
QUANTIZED = "quantized_decomposed.quantize_per_tensor"
"""Rounds a float tensor to integers, with one scale for the whole tensor."""

FAST_CACHE = 64 * 2**20
"""Bytes: more than the caches of one core have."""
MOST_CALLS = 256
"""That are timed: small inputs are in a cache when they come."""


def guards_of(
    program: ExportedProgram, example: Sequence[torch.Tensor], domain: NumberDomain
) -> tuple[Guard, ...]:
    """The guards of a graph in an engine's number domain. Values that the example itself holds are let through.

    Raises `RefusedTechnique` where the example's own integers leave the domain.
    """
    bounds = _bounds(program, example, domain)
    guards = []
    for index, tensor in enumerate(example):
        least, most = bounds.get(index, (None, None))
        values = _values(tensor, domain) if tensor.is_floating_point() else "any"
        if values != "any" or least is not None or most is not None:
            guards.append(Guard(tensor=index, values=values, least=least, most=most))
    return tuple(guards)


def compiled_domain(program: ExportedProgram, *, freezing: bool) -> NumberDomain:
    """The domain of code that Inductor makes of a graph for a CPU.

    With freezing it hands layers and the activations after them to oneDNN, whose ReLU and relatives drop NaN. Integers
    with a scale that calibration fixed hold neither NaN nor infinity.
    """
    names = set(map(operator_name, program.graph.nodes))
    drops = freezing and bool(names & LAYERS) and bool(names & ACTIVATIONS)
    drops = drops or QUANTIZED in names
    return NumberDomain(values="finite") if drops else NumberDomain()


def _values(tensor: torch.Tensor, domain: NumberDomain) -> Any:
    """The example's answer was compared: NaN or infinity in it is computed rightly, or the engine is not kept."""
    if domain.values == "any" or bool(tensor.isnan().any()):
        return "any"
    return "numbers" if bool(tensor.isinf().any()) else domain.values


def _bounds(
    program: ExportedProgram, example: Sequence[torch.Tensor], domain: NumberDomain
) -> dict[int, tuple[float | None, float | None]]:
    """Bounds of the inputs that need some."""
    if domain.integer_bits == 64 and domain.checks_indices:
        return {}
    ranges = IntegerRanges(program)
    places = {node: index for index, node in enumerate(ranges.inputs)}
    own = {node: _extremes(example[index]) for node, index in places.items() if _has_order(example[index])}
    whole = [node for node in own if not example[places[node]].is_floating_point()]
    given: dict[fx.Node, Range] = {node: (int(own[node][0]), int(own[node][1])) for node in whole}
    full: dict[fx.Node, Range] = {}
    for node in whole:
        info = torch.iinfo(example[places[node]].dtype)
        full[node] = info.min, info.max
    pinned: set[fx.Node] = set()
    unproved: frozenset[fx.Node] = frozenset()
    while True:
        rules = IntegerBounds(bits=domain.integer_bits, indices=not domain.checks_indices, but=unproved)
        try:
            found = widest(ranges, given, full, rules)
            break
        except OutOfBounds as unknown:  # no bound of the inputs is known to keep it: the example's own are
            pinned |= unknown.inputs
            unproved |= {unknown.node}
        except TooWide as error:
            raise RefusedTechnique(
                f"the engine computes integers in {domain.integer_bits} bits",
                found=f"{error} needs more, or wraps around, for the example's own values",
            ) from error
    bounds: dict[int, tuple[float | None, float | None]] = {
        places[node]: found[node] for node in whole if found[node] != full[node]
    }
    return bounds | {places[node]: own[node] for node in pinned if node in own}


def _has_order(tensor: torch.Tensor) -> bool:
    """Check whether a tensor has a least and a largest number."""
    return bool(tensor.numel()) and not tensor.is_complex() and tensor.dtype != torch.bool


def _extremes(tensor: torch.Tensor) -> tuple[float, float]:
    numbers = tensor.nan_to_num(0, 0, 0) if tensor.is_floating_point() else tensor
    return numbers.min().item(), numbers.max().item()


class Check:
    """Checks a call's arrays against guards, in one pass over each input.

    Bounds are checked before the engine runs: an index out of range may end the process. NaN and infinity only make the
    answer wrong, so they are looked for after the engine has run, when its inputs lie in a cache; the answer is then
    dropped.
    """

    def __init__(self, guards: Sequence[Guard]) -> None:
        self._bounded = [guard for guard in guards if guard.least is not None]
        self._others = [guard for guard in guards if guard.least is None]

    def __call__(self, arrays: Sequence[Any]) -> str | None:
        """Return the reason why a call is outside of the guards, or None."""
        return self.before(arrays) or self.after(arrays)

    def before(self, arrays: Sequence[Any]) -> str | None:
        """Return the reason why the engine must not be called, or None."""
        return _outside(self._bounded, arrays)

    def after(self, arrays: Sequence[Any]) -> str | None:
        """Return the reason why the engine's answer is not PyTorch's, or None."""
        return _outside(self._others, arrays)

    def guarded(self, arrays: Sequence[Any], call: Callable[[], Answer]) -> tuple[Answer | None, str | None]:
        """Return the answer of an engine's call, or the reason why it is not PyTorch's."""
        if (why := self.before(arrays)) is not None:
            return None, why
        try:
            answer = call()
        except Exception:
            if (why := self.after(arrays)) is None:
                raise
            return None, why
        why = self.after(arrays)
        return (answer, None) if why is None else (None, why)


def _outside(guards: Sequence[Guard], arrays: Sequence[Any]) -> str | None:
    """Return the reason why a call is outside of these guards, or None."""
    for guard in guards:
        array = arrays[guard.tensor]
        if not array.size:
            continue
        # Most calls pass by the total alone.
        unclear = guard.values != "any" and not math.isfinite(_total(array))
        if unclear and (fault := _not_finite(array, guard.values)):
            return f"input {guard.tensor} holds {fault}"
        if guard.least is None or guard.most is None:
            continue
        least, most = array.min(), array.max()
        if not (guard.least <= least and most <= guard.most):
            return (
                f"input {guard.tensor} holds values from {least} to {most}, "
                f"and the engine is right from {guard.least} to {guard.most}"
            )
    return None


def _total(array: Any) -> float:
    """Return a number that is NaN or infinite if any value is, and may overflow where none is."""
    # A sum of squares by BLAS is the cheapest pass that NumPy has, and it has no half precision. `vdot` warns of no
    # overflow, where `dot` does.
    return float(np.vdot(array, array)) if array.dtype.itemsize > 2 else math.nan


def check_seconds(spec: CallSpec) -> float:
    """Return how long the guards of a call take at the least, for inputs that are in no fast cache; 0 without guards.

    The sizes of the call must be numbers.
    """
    shapes = [[int(size) for size in tensor.shape] for tensor in spec.tensors]
    types = [getattr(torch, tensor.dtype) for tensor in spec.tensors]
    tensors = [torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, types, strict=True)]
    size = sum(tensor.nbytes for tensor in tensors)
    if not spec.guards or not size:
        return 0.0
    check, least, count = Check(spec.guards), math.inf, 1 + FAST_CACHE // size
    calls = [[tensor.clone() for tensor in tensors] for _ in range(min(count, MOST_CALLS))]
    for call in calls * 2:
        begun = time.perf_counter()
        check(
            [tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy() for tensor in call]
        )
        least = min(least, time.perf_counter() - begun)
    return least


def _not_finite(array: Any, values: str) -> str | None:
    """NaN or infinity, where the guard excludes it: of large numbers the sum of squares overflows, too."""
    if np.isnan(array).any():
        return "NaN"
    return "infinity" if values == "finite" and np.isinf(array).any() else None


def holds_nan(tensor: torch.Tensor) -> bool:
    """Check a tensor for NaN in one pass: a sum is NaN if any value is, or if infinities of both signs meet."""
    total = float(tensor.sum())
    return math.isnan(total) and bool(tensor.isnan().any())


def holds_not_finite(tensor: torch.Tensor) -> bool:
    """Check a tensor for NaN and infinity in one pass: a sum is finite if all values are, unless it overflows."""
    return not math.isfinite(float(tensor.sum())) and not bool(tensor.isfinite().all())


class Fallback:
    """Answers calls outside the guards by PyTorch's own operators, and says so once."""

    def __init__(self, make: Callable[[], CompiledCall] | None) -> None:
        self._make, self._call = make, None
        self._said = False

    def run(self, tensors: list[torch.Tensor], why: str) -> Any:
        """Return the answer. Raises `OutsideDomain` if there is no graph to compute it."""
        if self._make is None:
            raise OutsideDomain("the engine does not compute this call as PyTorch does", found=why)
        if not self._said:
            self._said = True
            say_slower(f"by PyTorch's own operators: {why}")
        self._call = self._call or self._make()
        return self._call.run(tensors)


def in_words(guards: Sequence[Guard]) -> list[str]:
    """Return the calls that guards keep from an engine, for the report; inputs with the same guard together."""
    inputs: dict[str, list[str]] = {}
    for guard in dict.fromkeys(guards):
        if guard.values != "any":
            said = "NaN" if guard.values == "numbers" else "NaN or infinity"
            inputs.setdefault(f"{said} in input", []).append(str(guard.tensor))
        if guard.least is not None:
            said = f"numbers outside {guard.least} to {guard.most} in input"
            inputs.setdefault(said, []).append(str(guard.tensor))
    return [f"{said} {', '.join(dict.fromkeys(where))}" for said, where in inputs.items()]
