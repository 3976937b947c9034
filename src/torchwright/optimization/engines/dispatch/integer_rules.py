# pyright: basic
"""The range of each operator's integers, from the ranges of its arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

Range = tuple[int, int]
RangeOf = Callable[[Any], Range]
"""The range of an argument. Raises `TypeError` where it has none."""
Rule = Callable[[fx.Node, RangeOf], Range | None]
KEPT = frozenset(
    {"_to_copy", "_unsafe_view", "alias", "amax", "amin", "chunk", "clone", "contiguous", "detach"}
    | {"diagonal", "dropout", "expand", "expand_as", "flatten", "flip", "gather", "index"}
    | {"index_select", "lift_fresh", "lift_fresh_copy", "movedim", "mT", "narrow", "numpy_T"}
    | {"permute", "repeat", "repeat_interleave", "reshape", "roll", "select", "slice", "sort"}
    | {"split", "split_with_sizes", "squeeze", "swapaxes", "t", "take_along_dim", "tensor_split"}
    | {"to", "transpose", "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "values", "view"}
    | {"view_as"}
)
"""Operators whose results hold values of their first argument and no others."""
TRUTH = frozenset(
    {"all", "any", "eq", "ge", "gt", "isfinite", "isinf", "isnan", "le", "logical_and"}
    | {"logical_not", "logical_or", "logical_xor", "lt", "ne"}
)
"""Operators whose results are true or false."""


def rule_of(node: fx.Node) -> Rule | None:
    """Return how the range of an operator's result follows from those of its arguments; None if it is unknown."""
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
    if isinstance(value, torch.Tensor) and is_whole(value) and value.dtype != torch.bool:
        whole = type_limits(value.dtype)
        return limits if within(limits, whole) else whole
    return limits


def _item(node: Any, of: RangeOf) -> Range | None:
    """A result of several: positions from sort, topk and max, or values of the first argument."""
    parent, place = node.args[0], node.args[1]
    assert isinstance(parent, fx.Node)
    name = operator_name(parent)
    if name in ("sort", "topk", "max", "min", "kthvalue", "mode", "cummax") and place == 1:
        return _position(parent, of)
    return of(parent.args[0])


def _position(node: Any, of: RangeOf) -> Range | None:
    value = node.args[0].meta["val"]
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if operator_name(node) in ("topk", "kthvalue"):
        dim = node.args[2] if len(node.args) > 2 else -1
    if operator_name(node) == "sort" and dim is None:
        dim = -1
    size = value.numel() if dim is None else value.shape[dim]
    hint = size_hint(size)
    return None if hint is None else (0, max(0, hint - 1))


def _corners(compute: Callable[[int, int], int]) -> Callable[[fx.Node, RangeOf], Range]:
    def rule(node: Any, of: RangeOf) -> Range:
        scale = node.kwargs.get("alpha", 1)
        (a, b), (c, d) = of(node.args[0]), of(node.args[1])
        if not isinstance(scale, int):
            raise TypeError
        values = [compute(x, y * scale) for x in (a, b) for y in (c, d)]
        return min(values), max(values)

    return rule


def _remainder(node: Any, of: RangeOf) -> Range:
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    if c <= 0:
        raise ValueError  # of a negative divisor, or by zero
    return (a, b) if a >= 0 and b < c else (0, d - 1)


def _fmod(node: Any, of: RangeOf) -> Range:
    """The result has the sign of the dividend."""
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    if c <= 0:
        raise ValueError
    return max(a, min(1 - d, 0)) if a < 0 else 0, min(b, d - 1) if b > 0 else 0


def _power(node: Any, of: RangeOf) -> Range:
    """A fixed exponent that is not negative; a larger one than 64 leaves every type from 2 on."""
    (a, b), (exponent, last) = of(node.args[0]), of(node.args[1])
    if exponent != last or not 0 <= exponent <= 64:
        raise ValueError
    values = [x**exponent for x in (a, b)]
    return min(*values, 0) if a < 0 < b else min(values), max(values)


def _square(node: Any, of: RangeOf) -> Range:
    a, b = of(node.args[0])
    return 0 if a < 0 < b else min(a * a, b * b), max(a * a, b * b)


def _product(node: Any, of: RangeOf) -> Range:
    """A matrix product: sums of as many products as the last dimension of the first argument holds."""
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    count = size_hint(node.args[0].meta["val"].shape[-1])
    if count is None:
        raise ValueError
    values = [count * x * y for x in (a, b) for y in (c, d)]
    return min(*values, 0), max(*values, 0)


def _inverted(node: Any, of: RangeOf) -> Range:
    a, b = of(node.args[0])
    return ~b, ~a


def _triangle(node: Any, of: RangeOf) -> Range:
    return _union(of(node.args[0]), (0, 0))


def _written(place: int) -> Callable[[Any, RangeOf], Range]:
    """Values of the first argument and of the one at `place`."""
    return lambda node, of: _union(of(node.args[0]), of(node.args[place]))


def _counted(node: Any, of: RangeOf) -> Range:
    count = size_hint(node.args[0].meta["val"].numel())
    if count is None:
        raise ValueError
    return 0, count


def _floor_divide(node: Any, of: RangeOf) -> Range:
    if node.kwargs.get("rounding_mode", "floor") not in ("floor", "trunc") or of(node.args[1])[0] <= 0:
        raise ValueError
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    values = [x // y for x in (a, b) for y in (c, d)]
    return min(values), max(values) + 1  # `trunc` rounds negative quotients up


def _negated(node: Any, of: RangeOf) -> Range:
    a, b = of(node.args[0])
    return -b, -a


def _absolute(node: Any, of: RangeOf) -> Range:
    a, b = of(node.args[0])
    return (0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))


def _clamp(node: Any, of: RangeOf) -> Range:
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


def _lesser(node: Any, of: RangeOf) -> Range:
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    return min(a, c), min(b, d)


def _greater(node: Any, of: RangeOf) -> Range:
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    return max(a, c), max(b, d)


def _extreme(of_two: Callable[[fx.Node, RangeOf], Range]) -> Callable[[fx.Node, RangeOf], Range]:
    """The rule of `max` and `min`: of two tensors, or of the values of one."""
    return lambda node, of: of_two(node, of) if _has_two(node) else of(node.args[0])


def _has_two(node: fx.Node) -> bool:
    return len(node.args) > 1 and isinstance(node.args[1], fx.Node)


def _union(*ranges: Range) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _where(node: Any, of: RangeOf) -> Range:
    return _union(of(node.args[1]), of(node.args[2]))


def _filled(node: Any, of: RangeOf) -> Range:
    return _union(of(node.args[0]), of(node.args[2]))


def _joined(node: Any, of: RangeOf) -> Range:
    return _union(*(of(part) for part in node.args[0]))


def _padded(node: Any, of: RangeOf) -> Range:
    fill = node.args[2] if len(node.args) > 2 else 0
    return _union(of(node.args[0]), of(int(fill)))


def _sum(node: Any, of: RangeOf) -> Range:
    """The sum, or the running sum, of as many values as the reduced dimensions hold."""
    a, b = of(node.args[0])
    value = node.args[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = range(value.dim()) if dims is None or dims == [] else dims if isinstance(dims, list) else [dims]
    count = math.prod(size_hint(value.shape[dim]) or 0 for dim in dims)
    return min(a, a * count, 0), max(b, b * count, 0)


def _arange(node: Any, of: RangeOf) -> Range:
    ends = [of(argument) for argument in node.args[:2]]
    low, high = ((0, 0), ends[0]) if len(ends) == 1 else ends
    return min(low[0], high[0]), max(low[1], high[1])


def _full(node: Any, of: RangeOf) -> Range:
    return of(int(node.args[1]))


def _bucket(node: Any, of: RangeOf) -> Range:
    boundaries = node.args[1].meta["val"] if operator_name(node) == "bucketize" else node.args[0].meta["val"]
    return 0, int(size_hint(boundaries.shape[-1]) or 0)


def _bits(node: Any, of: RangeOf) -> Range:
    """For operands that are not negative the result needs no more bits than they do."""
    (a, b), (c, d) = of(node.args[0]), of(node.args[1])
    if min(a, c) < 0:
        raise ValueError
    return 0, min(b, d) if "and" in operator_name(node) else (1 << max(b, d).bit_length()) - 1


def _constant(low: int, high: int) -> Callable[[fx.Node, RangeOf], Range]:
    return lambda node, of: (low, high)


RULES: dict[str, Rule] = {
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


def size_hint(size: Any) -> int | None:
    """Return the size that a graph was exported with."""
    if isinstance(size, int):
        return size
    return size.node.hint if isinstance(size, torch.SymInt) else None


def within(limits: Range, others: Range) -> bool:
    """Check whether a range lies in another."""
    return others[0] <= limits[0] and limits[1] <= others[1]


def type_limits(dtype: torch.dtype) -> Range:
    """Return the integers that a type holds."""
    info = torch.iinfo(dtype)
    return info.min, info.max


def is_whole(tensor: torch.Tensor) -> bool:
    """Check for integers or truth values."""
    return not (tensor.is_floating_point() or tensor.is_complex())
