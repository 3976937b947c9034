# pyright: basic
"""Input specifications of compiled calls, as plain data that an artifact keeps. No torch here.

A structure is nested lists, tuples and dicts as JSON: `{"tensor": 0}`, `{"constant": "3"}`, `{"tuple": […]}`,
`{"list": […]}`, `{"dict": {…}}`. A dataclass instance or named tuple is `{"class": "Name(field, …)", "items": […]}`, as
is another container that pytree knows; what pytree keeps of that besides, such as its keys, is part of the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torchwright.core.errors import WorkloadError

Structure = dict[str, Any]
DEEPEST = 32
"""The limit on nested containers."""
TENSOR, SIZE = "tensor", "size"
"""Results of a call: a tensor, and a whole number that follows from the sizes of its inputs."""
UNKNOWN = "…"
"""A default that no plain data can say; no `repr` of a constant is this."""
Kind = Literal["POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "KEYWORD_ONLY", "VAR_KEYWORD"]
"""Kinds of parameters, by their names in `inspect`."""


def package_file(index: int) -> str:
    """Return the package name of the workload's call of this number."""
    return f"package-{index}.pt2"


class NotHeld(WorkloadError):
    """A graph with free sizes that does not hold for the sizes of a call."""


class OutsideDomain(NotHeld):
    """A call with values that an engine does not compute as PyTorch does."""


@dataclass(frozen=True, kw_only=True)
class NumberDomain:
    """The numbers that an engine computes as PyTorch does."""

    integer_bits: int = 64
    """The bits, with the sign, of the integers that are computed exactly."""
    values: Literal["any", "numbers", "finite"] = "any"
    """The domain of floating-point inputs: `numbers` excludes NaN, `finite` infinity as well."""
    checks_indices: bool = True
    """True if an index out of range raises an error, as it does in PyTorch."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The values of one input that an engine answers as PyTorch does; the dispatcher checks them at every call."""

    tensor: int
    """Its index among the call's tensors."""
    values: Literal["any", "numbers", "finite"] = "any"
    """`numbers` excludes NaN, `finite` infinity as well."""
    least: float | None = None
    most: float | None = None
    """Bounds, both inclusive; of an input of integers they are whole numbers."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a call."""

    dtype: str
    shape: tuple[int | str, ...]
    """Sizes; one that may vary is a name in `CallSpec.sizes`."""
    order: tuple[int, ...]
    """Dimensions from the outermost in memory to the innermost; the tensor is dense."""

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides of a dense tensor of this order."""
        strides, step = [1] * len(shape), 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= max(1, shape[dim]) if isinstance(shape[dim], int) else shape[dim]
        return tuple(strides)


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """One call that was exported or compiled."""

    name: str
    structure: Structure
    """The structure of (args, kwargs)."""
    tensors: tuple[TensorSpec, ...]
    sizes: dict[str, tuple[int, int | None]] = field(default_factory=dict[str, "tuple[int, int | None]"])
    """Name → least and largest value."""
    mutates: tuple[int, ...] = ()
    """Tensors that the call changes in place."""
    outputs: tuple[TensorSpec, ...] | None = None
    """The results' tensors, flat; None if one has a size that is neither a plain number nor a name."""
    results: tuple[str, ...] = ()
    """For each of its results, flat: `TENSOR`, `SIZE`, or the `repr` of a constant; empty where all are tensors."""
    nesting: str = ""
    """The results' structure, as pytree writes it in JSON; empty if the engine knows it."""
    guards: tuple[Guard, ...] = ()
    """Checked before the call: outside of them the fallback answers."""
    nan: int | None = None
    """The place of a result that is NaN in every element if NaN arose inside the graph: the fallback answers then.
    Where it is the first one behind `results`, the graph has that result for this alone."""

    @property
    def graph_results(self) -> int | None:
        """The number of results of a converted graph; None where `results` does not say it."""
        tensors = sum(kind in (TENSOR, SIZE) for kind in self.results)
        return tensors + (self.nan == tensors) if self.results else None

    def bind(self, shapes: Sequence[Sequence[int]]) -> dict[str, int] | None:
        """The sizes by name, or None where the shapes are not this call's."""
        found: dict[str, int] = {}
        for spec, shape in zip(self.tensors, shapes, strict=True):
            if len(spec.shape) != len(shape):
                return None
            for expected, size in zip(spec.shape, shape, strict=True):
                wanted = found.setdefault(expected, size) if isinstance(expected, str) else expected
                if wanted != size:
                    return None
        for name, (least, largest) in self.sizes.items():
            if name in found and not (least <= found[name] and (largest is None or found[name] <= largest)):
                return None
        return found


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of the original's `forward`."""

    name: str
    kind: Kind
    default: str | None = None
    """`repr` of a plain default, `UNKNOWN` for another; None if there is no default."""


@dataclass(frozen=True, kw_only=True)
class Substitute:
    """Types that the original takes for some of a call's tensors, answering as it does for the compiled ones."""

    types: dict[int, str]
    """Tensor → type."""
    outputs: tuple[str, ...]
    """The types that the original answers with."""


@dataclass(frozen=True, kw_only=True)
class InputCapabilities:
    """The other inputs that the original was seen to take: found when the artifact was made."""

    parameters: tuple[Parameter, ...] = ()
    batched: tuple[int, ...] = ()
    """The tensors whose first size is the batch size."""
    pieces: bool = False
    """True if rows may be computed separately, in calls of the compiled batch size."""
    substitutes: tuple[Substitute, ...] = ()
    arrays: bool = False
    """NumPy arrays for tensors."""


def is_structure(value: Any, tensors: int, depth: int = 0) -> bool:
    """Check whether `value` is a structure whose tensors are numbered below `tensors`."""
    if not isinstance(value, dict) or depth > DEEPEST:
        return False
    match value:
        case {"tensor": int(index)} if len(value) == 1:
            return 0 <= index < tensors
        case {"constant": str()} if len(value) == 1:
            return True
        case {"dict": dict(items)} if len(value) == 1:
            return all(is_structure(item, tensors, depth + 1) for item in items.values())
        case {"tuple": list(items)} | {"list": list(items)} if len(value) == 1:
            return all(is_structure(item, tensors, depth + 1) for item in items)
        case {"class": str(), "items": list(items)} if len(value) == 2:
            return all(is_structure(item, tensors, depth + 1) for item in items)
        case _:
            return False
