# pyright: basic
"""Ranges of the integers in an exported graph: where they leave an engine's bits, and an index leaves its tensor.

Interval arithmetic from the ranges of the inputs. `widest` finds the widest ranges of the inputs for which nothing
does; a call within them needs no check of what the graph computes in between.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

Range = tuple[int, int]
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
KEPT = frozenset(
    {
        "_to_copy",
        "_unsafe_view",
        "alias",
        "amax",
        "amin",
        "chunk",
        "clone",
        "contiguous",
        "detach",
        "diagonal",
    }
    | {"dropout", "expand", "expand_as", "flatten", "flip", "gather", "index", "index_select", "lift_fresh"}
    | {
        "lift_fresh_copy",
        "movedim",
        "mT",
        "narrow",
        "numpy_T",
        "permute",
        "repeat",
        "repeat_interleave",
        "reshape",
    }
    | {
        "roll",
        "select",
        "slice",
        "sort",
        "split",
        "split_with_sizes",
        "squeeze",
        "swapaxes",
        "t",
        "to",
        "values",
    }
    | {"take_along_dim", "tensor_split", "transpose", "type_as", "unbind", "unflatten", "unfold", "unsqueeze"}
    | {"view", "view_as"}
)
"""Their results hold values of their first argument and no others."""
TRUTH = frozenset(
    {"all", "any", "eq", "ge", "gt", "isfinite", "isinf", "isnan", "le", "lt", "ne"}
    | {"logical_and", "logical_not", "logical_or", "logical_xor"}
)


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
                if isinstance(value, torch.Tensor) and _is_whole(value) and value.numel():
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
        if not isinstance(value, torch.Tensor) or not _is_whole(value) or value.dtype == torch.bool:
            return
        if limits is None and node not in self._of_floats:
            raise OutOfBounds(node, self.sources[node])
        if limits is not None and not (_within(limits, exact) and _within(limits, _limits(value.dtype))):
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
            size = _hint(value)
            return None if size is None else (size, size)
        if node.op != "call_function":
            return None
        rule = _rule(node)
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
                yield index, _hint(indexed.shape[dim]), negative


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


# ------------------------------------------------------------------------------------------------- operators

_Of = Callable[[Any], Range]


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


def _rule(node: fx.Node) -> Callable[[fx.Node, _Of], Range | None] | None:
    name = operator_name(node)
    if name in RULES:
        return RULES[name]
    if name in KEPT:
        return lambda node, of: _cast(node, of(node.args[0]))
    if name in TRUTH:
        return lambda node, of: (0, 1)
    if node.target is operator.getitem:
        return _item
    return None


def _cast(node: fx.Node, limits: Range) -> Range | None:
    """A cast to a narrower type wraps, so its range is unknown."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and _is_whole(value) and value.dtype != torch.bool:
        whole = _limits(value.dtype)
        return limits if _within(limits, whole) else whole
    return limits


def _item(node: Any, of: _Of) -> Range | None:
    """A result of several: positions from sort, topk and max, or values of the first argument."""
    parent, place = node.args[0], node.args[1]
    assert isinstance(parent, fx.Node)
    name = operator_name(parent)
    if name in ("sort", "topk", "max", "min", "kthvalue", "mode", "cummax") and place == 1:
        return _position(parent, of)
    return of(parent.args[0])


def _position(node: Any, of: _Of) -> Range | None:
    value = node.args[0].meta["val"]
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if operator_name(node) in ("topk", "kthvalue"):
        dim = node.args[2] if len(node.args) > 2 else -1
    if operator_name(node) == "sort" and dim is None:
        dim = -1
    size = value.numel() if dim is None else value.shape[dim]
    hint = _hint(size)
    return None if hint is None else (0, max(0, hint - 1))


def _corners(compute: Callable[[int, int], int]) -> Callable[[fx.Node, _Of], Range]:
    def rule(node: Any, of: _Of) -> Range:
        scale = node.kwargs.get("alpha", 1)
        (a, b), (c, d) = of(node.args[0]), of(node.args[1])
        if not isinstance(scale, int):
            raise TypeError
        values = [compute(x, y * scale) for x in (a, b) for y in (c, d)]
        return min(values), max(values)

    return rule


def _remainder(node: Any, of: _Of) -> Range:
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    if c <= 0:
        raise ValueError  # of a negative divisor, or by zero
    return (a, b) if a >= 0 and b < c else (0, d - 1)


def _fmod(node: Any, of: _Of) -> Range:
    """The result has the sign of the dividend."""
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    if c <= 0:
        raise ValueError
    return max(a, min(1 - d, 0)) if a < 0 else 0, min(b, d - 1) if b > 0 else 0


def _power(node: Any, of: _Of) -> Range:
    """A fixed exponent that is not negative; a larger one than 64 leaves every type from 2 on."""
    (a, b), (exponent, last) = of(node.args[0]), of(node.args[1])
    if exponent != last or not 0 <= exponent <= 64:
        raise ValueError
    values = [x**exponent for x in (a, b)]
    return min(*values, 0) if a < 0 < b else min(values), max(values)


def _square(node: Any, of: _Of) -> Range:
    a, b = of(node.args[0])
    return 0 if a < 0 < b else min(a * a, b * b), max(a * a, b * b)


def _product(node: Any, of: _Of) -> Range:
    """A matrix product: sums of as many products as the last dimension of the first argument holds."""
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    count = _hint(node.args[0].meta["val"].shape[-1])
    if count is None:
        raise ValueError
    values = [count * x * y for x in (a, b) for y in (c, d)]
    return min(*values, 0), max(*values, 0)


def _inverted(node: Any, of: _Of) -> Range:
    a, b = of(node.args[0])
    return ~b, ~a


def _triangle(node: Any, of: _Of) -> Range:
    return _union(of(node.args[0]), (0, 0))


def _written(place: int) -> Callable[[Any, _Of], Range]:
    """Values of the first argument and of the one at `place`."""
    return lambda node, of: _union(of(node.args[0]), of(node.args[place]))


def _counted(node: Any, of: _Of) -> Range:
    count = _hint(node.args[0].meta["val"].numel())
    if count is None:
        raise ValueError
    return 0, count


def _floor_divide(node: Any, of: _Of) -> Range:
    if node.kwargs.get("rounding_mode", "floor") not in ("floor", "trunc") or of(node.args[1])[0] <= 0:
        raise ValueError
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    values = [x // y for x in (a, b) for y in (c, d)]
    return min(values), max(values) + 1  # `trunc` rounds negative quotients up


def _negated(node: Any, of: _Of) -> Range:
    a, b = of(node.args[0])
    return -b, -a


def _absolute(node: Any, of: _Of) -> Range:
    a, b = of(node.args[0])
    return (0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))


def _clamp(node: Any, of: _Of) -> Range:
    name = operator_name(node)
    low = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
    high = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    if name == "clamp_max":
        low, high = None, low
    try:
        a, b = of(node.args[0])
    except TypeError:
        a, b = -math.inf, math.inf
    if low is not None:
        a, b = max(a, of(low)[0]), max(b, of(low)[1])
    if high is not None:
        a, b = min(a, of(high)[0]), min(b, of(high)[1])
    return int(a), int(b)


def _lesser(node: Any, of: _Of) -> Range:
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    return min(a, c), min(b, d)


def _greater(node: Any, of: _Of) -> Range:
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    return max(a, c), max(b, d)


def _extreme(of_two: Callable[[fx.Node, _Of], Range]) -> Callable[[fx.Node, _Of], Range]:
    """The rule of `max` and `min`: of two tensors, or of the values of one."""
    return lambda node, of: of_two(node, of) if _has_two(node) else of(node.args[0])


def _has_two(node: fx.Node) -> bool:
    return len(node.args) > 1 and isinstance(node.args[1], fx.Node)


def _union(*ranges: Range) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _where(node: Any, of: _Of) -> Range:
    return _union(of(node.args[1]), of(node.args[2]))


def _filled(node: Any, of: _Of) -> Range:
    return _union(of(node.args[0]), of(node.args[2]))


def _joined(node: Any, of: _Of) -> Range:
    return _union(*(of(part) for part in node.args[0]))


def _padded(node: Any, of: _Of) -> Range:
    fill = node.args[2] if len(node.args) > 2 else 0
    return _union(of(node.args[0]), of(int(fill)))


def _sum(node: Any, of: _Of) -> Range:
    """The sum, or the running sum, of as many values as the reduced dimensions hold."""
    a, b = of(node.args[0])
    value = node.args[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = range(value.dim()) if dims is None or dims == [] else dims if isinstance(dims, list) else [dims]
    count = math.prod(_hint(value.shape[dim]) or 0 for dim in dims)
    return min(a, a * count, 0), max(b, b * count, 0)


def _arange(node: Any, of: _Of) -> Range:
    ends = [of(argument) for argument in node.args[:2]]
    low, high = ((0, 0), ends[0]) if len(ends) == 1 else ends
    return min(low[0], high[0]), max(low[1], high[1])


def _full(node: Any, of: _Of) -> Range:
    return of(int(node.args[1]))


def _bucket(node: Any, of: _Of) -> Range:
    boundaries = node.args[1].meta["val"] if operator_name(node) == "bucketize" else node.args[0].meta["val"]
    return 0, int(_hint(boundaries.shape[-1]) or 0)


def _bits(node: Any, of: _Of) -> Range:
    """For operands that are not negative the result needs no more bits than they do."""
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    if min(a, c) < 0:
        raise ValueError
    return 0, min(b, d) if "and" in operator_name(node) else (1 << max(b, d).bit_length()) - 1


def _constant(low: int, high: int) -> Callable[[fx.Node, _Of], Range]:
    return lambda node, of: (low, high)


RULES: dict[str, Callable[[fx.Node, _Of], Range | None]] = {
    "add": _corners(lambda x, y: x + y),
    "sub": _corners(lambda x, y: x - y),
    "rsub": _corners(lambda x, y: y - x),
    "mul": _corners(lambda x, y: x * y),
    "neg": _negated,
    "abs": _absolute,
    "remainder": _remainder,
    "fmod": _fmod,
    "pow": _power,
    "square": _square,
    "mm": _product,
    "bmm": _product,
    "matmul": _product,
    "mv": _product,
    "dot": _product,
    "bitwise_not": _inverted,
    "tril": _triangle,
    "triu": _triangle,
    "copy": _written(1),
    "select_scatter": _written(1),
    "slice_scatter": _written(1),
    "diagonal_scatter": _written(1),
    "masked_scatter": _written(2),
    "index_put": _written(2),
    "index_fill": _written(3),
    "index_copy": _written(3),
    "scatter": _written(3),
    "count_nonzero": _counted,
    "floor_divide": _floor_divide,
    "div": _floor_divide,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "minimum": _lesser,
    "maximum": _greater,
    "min": _extreme(_lesser),
    "max": _extreme(_greater),
    "where": _where,
    "masked_fill": _filled,
    "cat": _joined,
    "stack": _joined,
    "constant_pad_nd": _padded,
    "pad": _padded,
    "sum": _sum,
    "cumsum": _sum,
    "arange": _arange,
    "full": _full,
    "full_like": _full,
    "new_full": lambda node, of: of(node.args[2]),
    "fill": lambda node, of: of(node.args[1]),
    "scalar_tensor": lambda node, of: of(node.args[0]),
    "zero": _constant(0, 0),
    "zeros": _constant(0, 0),
    "zeros_like": _constant(0, 0),
    "new_zeros": _constant(0, 0),
    "ones": _constant(1, 1),
    "ones_like": _constant(1, 1),
    "new_ones": _constant(1, 1),
    "sign": _constant(-1, 1),
    "one_hot": _constant(0, 1),
    "argmax": _position,
    "argmin": _position,
    "argsort": _position,
    "bucketize": _bucket,
    "searchsorted": _bucket,
    "bitwise_and": _bits,
    "bitwise_or": _bits,
    "bitwise_xor": _bits,
    "__lshift__": _corners(lambda x, y: x << y),
    "bitwise_left_shift": _corners(lambda x, y: x << y),
    "__rshift__": _corners(lambda x, y: x >> y),
    "bitwise_right_shift": _corners(lambda x, y: x >> y),
}


def operator_name(node: fx.Node) -> str:
    """Such as `add`, of `aten.add_.Tensor`; operators of other libraries keep the library's name."""
    name = str(node.target).rpartition(".")[0].removeprefix("aten.")
    return name if name.startswith("__") else name.rstrip("_")


def _dim(node: Any) -> int:
    if operator_name(node) == "embedding":
        return 0
    dim = node.args[2] if operator_name(node) == "take_along_dim" and len(node.args) > 2 else node.args[1]
    assert isinstance(dim, int)
    return dim


def _hint(size: Any) -> int | None:
    """The size that a graph was exported with."""
    if isinstance(size, int):
        return size
    return size.node.hint if isinstance(size, torch.SymInt) else None


def _within(limits: Range, others: Range) -> bool:
    return others[0] <= limits[0] and limits[1] <= others[1]


def _limits(dtype: torch.dtype) -> Range:
    info = torch.iinfo(dtype)
    return info.min, info.max


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not _is_whole(value)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
