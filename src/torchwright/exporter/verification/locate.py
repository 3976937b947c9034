# pyright: basic
"""The first layer at which a package and the graph it was made from part."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import WorkloadError
from torchwright.core.json_file import read_json, typed
from torchwright.exporter.base import Values
from torchwright.exporter.package import REFERENCE
from torchwright.exporter.verification.process import RunFailed
from torchwright.exporter.verification.reference import (
    Layers,
    graph_values,
    read_calls,
    read_graph,
    read_layers,
)
from torchwright.optimization.artifact.tree import read_tree
from torchwright.workloads.accuracy import relative_error

ERRORS = "errors.json"
"""The file of `Errors`, next to the reference."""
CODE, SETTINGS = "the code itself", "its settings"
"""The name given in place of a module."""
RISES, LEAST = 2.0, 1e-3
"""The factor and the margin above the recorded error that count as a difference. Another machine rounds differently,
too.
"""
Ask = Callable[..., dict[str, Any]]
"""The time limit of the process that runs the package."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The errors of a package's operators when it was written, by their keys."""

    operators: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The place where outputs diverge."""

    module: str
    operator: str
    line: str = ""
    error: float | None = None
    """Relative, of what this operator gives, where that can be seen."""
    before: float = 0.0
    """The largest of the operators before it that could be compared."""
    written: float | None = None
    """This operator's error when the package was written, if it was kept."""
    change: str = ""
    """The changed setting or weight, if the operator's values cannot be seen."""

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        if self.change:
            return f"outputs part at {self.module}, {self.operator}: {self.change}"
        if self.error is None:
            return f"outputs part at {self.module}: with the original's {self.operator} they are right"
        if self.module == SETTINGS:
            return f"outputs part at its settings: {self.operator}"
        if self.module == CODE:
            return f"outputs part in the code: with {self.operator} they are still off by {self.error:.2g}"
        when = "" if self.written is None else f" ({self.written:.2g} when it was written)"
        return (
            f"outputs part at {self.module}, {self.operator}{where}: off by {self.error:.2g}{when}, "
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
        wanted, layers = graph_values(program, call.tensors), read_layers(folder / REFERENCE)
        written = read_errors(folder / REFERENCE)
        found = first_parting(wanted, read_tree(out), layers, allowed, named=named, written=written)
        if found is not None:
            return found
        furthest = ask("furthest")
        if furthest["name"]:
            name = furthest["name"]
            return Parting(module=name.rpartition(".")[0], operator=f"weight {name}", error=furthest["error"])
        settings = ask("settings")
        changed = settings["changed"]
        if changed and settings["of_layers"]:
            place, _, what = changed[0].partition(": ")
            module, _, operator = place.rpartition(", ")
            return Parting(module=module, operator=operator, change=what)
        if changed:
            return Parting(module=SETTINGS, operator="; ".join(changed))
        answer = ask("weights", allowed=allowed)
    except RunFailed:
        return None
    if names := answer["names"]:
        module = ", ".join(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
        return Parting(module=module, operator=f"weight {', '.join(names)}")
    if answer["error"] is not None and answer["error"] > allowed:
        return Parting(module=CODE, operator="all of the original's weights", error=answer["error"])
    return None


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
    wanted: Values,
    found: Values,
    layers: Layers,
    allowed: float,
    *,
    named: bool = False,
    written: Mapping[str, float] | None = None,
) -> Parting | None:
    """In the order of the graph; operators of a kind of which the package has another number are left out.

    But where values are `named` by their operators, of which some may be missing. What operators were off by when the
    package was `written` comes first: an error that has risen from there by more than `RISES`.
    """
    errors, written = errors_of(wanted, found, named=named), written or {}
    risen = {key: RISES * error + LEAST for key, error in written.items()}
    return _first_above(risen, errors, layers, written) or _first_above(
        dict.fromkeys(errors, allowed), errors, layers, {}
    )


def _first_above(
    bounds: Mapping[str, float], errors: Mapping[str, float], layers: Layers, written: Mapping[str, float]
) -> Parting | None:
    """Return the first operator whose error exceeds its bound; operators without a bound are skipped."""
    before = 0.0
    for key, error in errors.items():
        if error > bounds.get(key, math.inf):
            return Parting(
                module=layers.modules.get(key, "an unnamed module"),
                operator=key.partition("#")[0],
                line=layers.lines.get(key, ""),
                error=error,
                before=before,
                written=written.get(key),
            )
        before = max(before, error)
    return None


def errors_of(wanted: Values, found: Values, *, named: bool = False) -> dict[str, float]:
    """Return the errors of the operators that both have, in the graph's order."""
    counts = _kinds(found)
    kinds = {kind for kind, n in _kinds(wanted).items() if named or counts.get(kind) == n}
    return {
        key: _error(value, found[key])
        for key, value in wanted.items()
        if key.partition("#")[0] in kinds and key in found and found[key].shape == value.shape
    }


def keep_errors(folder: Path, ask: Ask, scratch: Path, *, named: bool = False) -> None:
    """Keep what each operator of a package that holds is off by: rounding hides a fault from any common bound."""
    out = scratch / "errors"
    ask("values", out=str(out))
    reference = folder / REFERENCE
    wanted = graph_values(read_graph(reference, trust=True), read_calls(reference)[0].tensors)
    errors = errors_of(wanted, read_tree(out), named=named)
    if kept := {key: error for key, error in errors.items() if math.isfinite(error)}:
        (reference / ERRORS).write_text(json.dumps(asdict(Errors(operators=kept))), encoding="utf-8")


def read_errors(folder: Path) -> dict[str, float]:
    """Empty where none were kept. Raises `ArtifactError` for what is something else."""
    file = folder / ERRORS
    return typed(read_json(file), Errors, ERRORS).operators if file.is_file() else {}


def _kinds(values: Values) -> Counter[str]:
    return Counter(key.partition("#")[0] for key in values)


def _error(before: torch.Tensor, after: torch.Tensor) -> float:
    try:
        return relative_error([before], [after]).value
    except WorkloadError:  # NaN where there was none
        return float("inf")
