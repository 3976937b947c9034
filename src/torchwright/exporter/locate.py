# pyright: basic
"""The first layer at which a package and the graph it was made from part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchwright.artifact.tree import read_tree
from torchwright.errors import WorkloadError
from torchwright.exporter.base import Values
from torchwright.exporter.package import REFERENCE
from torchwright.exporter.process import RunFailed
from torchwright.exporter.reference import Layers, graph_values, read_calls, read_graph, read_layers
from torchwright.workloads.accuracy import relative_error

Ask = Callable[..., dict[str, Any]]
"""Of the process that runs the package."""


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where outputs part."""

    module: str
    operator: str
    line: str = ""
    error: float | None = None
    """Relative, of what this operator gives, where that can be seen."""
    before: float = 0.0
    """The largest of the operators before it that could be compared."""

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        if self.error is None:
            return f"outputs part at {self.module}: with the original's {self.operator} they are right"
        return (
            f"outputs part at {self.module}, {self.operator}{where}: off by {self.error:.2g}, "
            f"before it by {self.before:.2g} at most"
        )


def locate(folder: Path, ask: Ask, scratch: Path, allowed: float, *, named: bool = False) -> Parting | None:
    """The first operator whose value in the package is off by more than `allowed`.

    Of a package whose weights can be read it is the one that is furthest off. A runtime that tells neither is given the
    reference's weights in place of its own: those that make its answer right were wrong. None where nothing is found.
    """
    program = read_graph(folder / REFERENCE, trust=True)
    call = read_calls(folder / REFERENCE)[0]
    out = scratch / "values"
    try:
        ask("values", out=str(out))
        found = first_parting(
            graph_values(program, call.tensors),
            read_tree(out),
            read_layers(folder / REFERENCE),
            allowed,
            named=named,
        )
        if found is not None:
            return found
        furthest = ask("furthest")
        if furthest["error"] > allowed:
            name = furthest["name"]
            return Parting(module=name.rpartition(".")[0], operator=f"weight {name}", error=furthest["error"])
        names = ask("weights", allowed=allowed)["names"]
    except RunFailed:
        return None
    if not names:
        return None
    module = ", ".join(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    return Parting(module=module, operator=f"weight {', '.join(names)}")


def smallest(names: Sequence[str], right: Callable[[Sequence[str]], bool]) -> list[str]:
    """The fewest of `names` that make things right, by halves; none where not even all do, or none is needed."""
    if right([]) or not right(names):
        return []
    left = list(names)
    while len(left) > 1:
        half = len(left) // 2
        if right(left[:half]):
            left = left[:half]
        elif right(left[half:]):
            left = left[half:]
        else:  # faults in both
            return left
    return left


def first_parting(
    wanted: Values, found: Values, layers: Layers, allowed: float, *, named: bool = False
) -> Parting | None:
    """In the order of the graph; operators of a kind of which the package has another number are left out.

    But where values are `named` by their operators, of which some may be missing.
    """
    kinds = {kind for kind, n in _kinds(wanted).items() if named or _kinds(found).get(kind) == n}
    before = 0.0
    for key, value in wanted.items():
        kind = key.partition("#")[0]
        if kind not in kinds or key not in found or found[key].shape != value.shape:
            continue
        error = _error(value, found[key])
        if error > allowed:
            return Parting(
                module=layers.modules.get(key, "an unnamed module"),
                operator=kind,
                line=layers.lines.get(key, ""),
                error=error,
                before=before,
            )
        before = max(before, error)
    return None


def _kinds(values: Values) -> Counter[str]:
    return Counter(key.partition("#")[0] for key in values)


def _error(before: torch.Tensor, after: torch.Tensor) -> float:
    try:
        return relative_error([before], [after]).value
    except WorkloadError:  # NaN where there was none
        return float("inf")
