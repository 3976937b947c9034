# pyright: basic
"""Ranges of the integers in an exported graph: where they leave an engine's bits, and an index leaves its tensor.

Interval arithmetic from the ranges of the inputs. `widest` finds the widest ranges of the inputs for which nothing
does; a call within them needs no check of what the graph computes in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from torchwright.optimization.engines.dispatch.integer_rules import (
    Range,
    is_whole,
    operator_name,
    rule_of,
    size_hint,
    type_limits,
    within,
)

INDEXED = {
    "embedding": (0, 1, False),
    "index_select": (0, 2, False),
    "gather": (0, 2, False),
    "index": (0, 1, True),
    "index_put": (0, 1, True),
    "scatter": (0, 2, False),
    "take_along_dim": (0, 1, False),
}
"""Operator → the argument that is indexed, the index, and whether PyTorch takes negative ones."""


def exact_integers(bits: int) -> Range:
    """Return the integers of so many bits, with the sign."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


class TooWide(Exception):
    """An operator whose integers may need more bits than the engine computes exactly, or than their own type has."""


class OutOfBounds(Exception):
    """An operator whose index or integers have no known bounds, or an index beyond its table, and the inputs that it
    depends on."""

    def __init__(self, node: fx.Node, inputs: frozenset[fx.Node]) -> None:
        super().__init__(node.name)
        self.node, self.inputs = node, inputs


@dataclass(frozen=True, kw_only=True)
class IntegerBounds:
    """Bounds that every integer of a graph must keep."""

    bits: int = 64
    indices: bool = True
    """Indices lie within what they index."""
    but: frozenset[fx.Node] = frozenset()
    """Operators that are not looked at."""


class IntegerRanges:
    """The integers of one graph, and the inputs that they depend on."""

    def __init__(self, program: ExportedProgram) -> None:
        self._nodes = list(program.graph.nodes)
        kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        held = {**program.state_dict, **program.constants}
        self.inputs: list[fx.Node] = []
        self._constants: dict[fx.Node, Range] = {}
        self.sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self._of_floats: set[fx.Node] = set()
        """Integers computed of floating-point values, whose range nobody knows."""
        for node in self._nodes:
            if node.op != "placeholder":
                # A size is no value: what is computed of sizes depends on no input.
                if str(node.target).startswith("aten.sym_"):
                    self.sources[node] = frozenset()
                else:
                    self.sources[node] = frozenset().union(*(self.sources[n] for n in node.all_input_nodes))
                if any(_is_float(n) or n in self._of_floats for n in node.all_input_nodes):
                    self._of_floats.add(node)
                continue
            spec = kinds.get(node.name)
            user = spec is not None and spec.kind is InputKind.USER_INPUT
            is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
            self.sources[node] = frozenset([node]) if user and is_tensor else frozenset()
            if user and is_tensor:
                self.inputs.append(node)
            elif not user and spec is not None:
                value = held.get(str(spec.target))
                if isinstance(value, torch.Tensor) and is_whole(value) and value.numel():
                    self._constants[node] = int(value.min()), int(value.max())

    def check(self, given: dict[fx.Node, Range], rules: IntegerBounds) -> None:
        """Raise `TooWide` or `OutOfBounds` at the first node that breaks a rule for inputs in these ranges."""
        found: dict[fx.Node, Range | None] = {}
        for node in self._nodes:
            found[node] = self._range(node, given, found)
            if not self.sources[node]:
                continue
            if node in rules.but:
                continue
            if rules.indices:
                self._check_index(node, found)
            if rules.bits < 64:
                self._check_width(node, found[node], exact_integers(rules.bits))

    def _check_width(self, node: fx.Node, limits: Range | None, exact: Range) -> None:
        """Engines that compute in fewer bits saturate narrower types, where PyTorch's wrap."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not is_whole(value) or value.dtype == torch.bool:
            return
        if limits is None and node not in self._of_floats:
            raise OutOfBounds(node, self.sources[node])
        if limits is not None and not (within(limits, exact) and within(limits, type_limits(value.dtype))):
            raise TooWide(str(node.target))

    def _range(
        self, node: fx.Node, given: dict[fx.Node, Range], found: dict[fx.Node, Range | None]
    ) -> Range | None:
        """Return the range of a node's values; None if it is unknown."""
        if node in given:
            return given[node]
        if node in self._constants:
            return self._constants[node]
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            return 0, 1
        if isinstance(value, int | torch.SymInt):
            size = size_hint(value)
            return None if size is None else (size, size)
        if node.op != "call_function":
            return None
        rule = rule_of(node)
        if rule is None:
            return None
        try:
            return rule(node, lambda argument: _of(argument, found))
        except (TypeError, ValueError, IndexError, OverflowError):  # an argument without a range
            return None

    def tables(self, given: fx.Node) -> list[int]:
        """Return the sizes of the dimensions that are indexed by values computed from an input."""
        indices = [index for node in self._nodes for index in self._indices(node)]
        return [size for index, size, _ in indices if given in self.sources[index] and size is not None]

    def _check_index(self, node: fx.Node, found: dict[fx.Node, Range | None]) -> None:
        for index, size, negative in self._indices(node):
            limits = found[index]
            low = -size if negative and size is not None else 0
            if limits is None or size is None or limits[0] < low or limits[1] >= size:
                raise OutOfBounds(node, self.sources[index])

    def _indices(self, node: Any) -> Iterator[tuple[fx.Node, int | None, bool]]:
        """Yield an operator's indices that depend on an input: the index, the indexed size, negative ones allowed."""
        known = INDEXED.get(operator_name(node)) if node.op == "call_function" else None
        if known is None:
            return
        table, place, negative = known
        indexed = node.args[table].meta["val"]
        indices = node.args[place] if isinstance(node.args[place], list | tuple) else [node.args[place]]
        dims = range(len(indices)) if negative else [_dim(node)]
        for dim, index in zip(dims, indices, strict=False):
            if isinstance(index, fx.Node) and self.sources[index] and index.meta["val"].dtype != torch.bool:
                yield index, size_hint(indexed.shape[dim]), negative


def widest(
    ranges: IntegerRanges, example: dict[fx.Node, Range], full: dict[fx.Node, Range], rules: IntegerBounds
) -> dict[fx.Node, Range]:
    """The widest ranges of the inputs, around the example's, that keep the rules.

    Raises `TooWide` or `OutOfBounds` where the example's own do not.
    """
    given = dict(example)
    ranges.check(given, rules)

    def holds(node: fx.Node, limits: Range) -> bool:
        try:
            ranges.check(given | {node: limits}, rules)
        except (TooWide, OutOfBounds):
            return False
        return True

    for node in example:
        low, high = given[node]
        high = _last(high, full[node][1], lambda most, low=low, node=node: holds(node, (low, most)))
        low = -_last(-low, -full[node][0], lambda least, high=high, node=node: holds(node, (-least, high)))
        given[node] = low, high
    return given


def _last(good: int, end: int, holds: Callable[[int], bool]) -> int:
    """The last number from `good` to `end` that holds, if all before it do."""
    if good >= end or holds(end):
        return max(good, end)
    while end - good > 1:
        middle = (good + end) // 2
        good, end = (middle, end) if holds(middle) else (good, middle)
    return good


def _of(argument: Any, found: dict[fx.Node, Range | None]) -> Range:
    """The range of an argument. Raises `TypeError` where it has none."""
    if isinstance(argument, fx.Node):
        limits = found.get(argument)
        if limits is None:
            raise TypeError
        return limits
    if isinstance(argument, bool | int):
        return int(argument), int(argument)
    raise TypeError


def _dim(node: Any) -> int:
    if operator_name(node) == "embedding":
        return 0
    dim = node.args[2] if operator_name(node) == "take_along_dim" and len(node.args) > 2 else node.args[1]
    assert isinstance(dim, int)
    return dim


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not is_whole(value)
