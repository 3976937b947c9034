# pyright: basic
"""NaN that arises inside a graph from finite inputs, for libraries whose later operators drop it.

In PyTorch a row of zeros divided by its norm stays NaN to the last layer. OpenVINO's ReLU turns it into zeros. A number
that is cast to an integer beyond the engine's bits is flagged the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.utils import _pytree as pytree

from torchwright.optimization.engines.dispatch.integer_ranges import exact_integers
from torchwright.optimization.engines.dispatch.integer_rules import KEPT, operator_name
from torchwright.optimization.engines.rewrites.attention_graph import varying
from torchwright.optimization.techniques.shared.joining import make_call

aten = torch.ops.aten
POSITIVE, NOT_NEGATIVE, ANY = 2, 1, 0
"""Signs: what is proved of all values of a node, NaN aside."""
FEW = 4096
"""Constants of more numbers are not searched for their least: divisors and shifts are small."""
DROPS = frozenset(
    {"relu", "relu6", "leaky_relu", "prelu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardtanh"}
    | {"hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus", "softmax", "_softmax", "log_softmax"}
    | {"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "max", "min", "amax", "amin"}
    | {"argmax", "argmin", "topk", "sort", "argsort", "scaled_dot_product_attention"}
    | {"max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "lstm", "gru"}
    | {"eq", "ne", "gt", "ge", "lt", "le", "isnan", "isinf", "isfinite", "nan_to_num", "sign"}
    | {"scatter_reduce", "index_reduce"}
)
"""Operators that may answer a number for NaN in OpenVINO or ONNX Runtime."""
WHOLE = frozenset({"div", "true_divide", "rsqrt", "reciprocal"})
"""Operators whose infinity becomes NaN at the next product with zero."""
PARTIAL = frozenset({"sqrt", "log", "log2", "log10", "log1p", "pow", "acos", "asin", "acosh", "atanh"})
"""Operators that PyTorch defines for a part of all finite numbers."""
LEAST = {
    **dict.fromkeys(("abs", "exp", "relu", "relu6", "sigmoid", "softmax", "softplus", "square", "sqrt"), 1),
    **dict.fromkeys(("linalg_vector_norm", "norm", "var", "std", "one_hot", "hardsigmoid"), 1),
    **dict.fromkeys(("ones", "ones_like", "new_ones", "cosh"), 2),
}
"""Operator → the sign of all its values."""
CASTS = frozenset({"to", "_to_copy", "type_as"})
SAME = KEPT | {
    "sum",
    "mean",
    "cumsum",
    "max",
    "min",
    "amax",
    "amin",
    "max_pool2d",
    "avg_pool2d",
    "rsqrt",
    "tanh",
    "log1p",
}
"""Operators whose values have the sign of their first argument's."""


def nan_makers(program: ExportedProgram) -> list[fx.Node]:
    """Return the operators that make NaN of some finite numbers, where a later operator may drop it."""
    signs, graph = _signs(program), program.graph_module.graph
    may = varying(program) & _dropped(graph)
    return [node for node in graph.nodes if node in may and _makes_nan(node, signs)]


def wide_casts(program: ExportedProgram) -> list[fx.Node]:
    """Return the casts of varying numbers to integers, whose values may be beyond an engine's."""
    may = varying(program)
    return [node for node in program.graph_module.graph.nodes if node in may and _is_wide_cast(node)]


def flag_nan(program: ExportedProgram, makers: Sequence[fx.Node], bits: int = 64) -> int:
    """Make, in place, one result NaN in every element where a maker has made NaN, or an integer beyond `bits` bits.

    Returns the place of that result among those that are no constants. If none of them is a floating-point number that
    depends on the inputs, as in a model that returns classes, a new result follows all others.
    """
    nodes, output = varying(program), program.graph_module.graph.output_node()
    results: Any = output.args[0]
    place = next(
        (place for place, result in enumerate(results) if result in nodes and _is_float(result)), len(results)
    )
    with program.graph_module.graph.inserting_before(output):
        arisen = _any_of([_arisen(maker, bits) for maker in makers])
        own = place < len(results)
        result = results[place] if own else make_call(aten._to_copy.default, arisen, dtype=torch.float32)
        flagged = make_call(aten.where.ScalarSelf, arisen, float("nan"), result)
    output.args = ((*results[:place], flagged, *results[place + 1 :]),)
    signature = program.module_call_graph[0].signature
    assert signature is not None
    if own:
        program.graph_signature.replace_all_uses(result.name, flagged.name)
    else:
        added = OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=flagged.name), None)
        program.graph_signature.output_specs.append(added)
        signature.out_spec = pytree.tree_structure(tuple(range(place + 1)))
    signature.outputs = [spec.arg for spec in program.graph_signature.output_specs]
    program.graph_module.recompile()
    return sum(isinstance(each, fx.Node) for each in results[:place])


class _Signs:
    """The proved signs of a graph's nodes."""

    def __init__(self) -> None:
        self.of_node: dict[fx.Node, int] = {}
        self.not_zero: set[fx.Node] = set()
        """Constants."""

    def of(self, argument: Any) -> int:
        if isinstance(argument, fx.Node):
            return self.of_node.get(argument, ANY)
        if isinstance(argument, bool | int | float):
            return POSITIVE if argument > 0 else NOT_NEGATIVE if argument == 0 else ANY
        return ANY


def _signs(program: ExportedProgram) -> _Signs:
    signs = _Signs()
    held = {**program.state_dict, **program.constants}
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph_module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            constant = held.get(str(kinds[node.name].target))
            if isinstance(constant, torch.Tensor):
                _hold(signs, node, constant)
        elif node.op == "call_function":
            if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
                signs.of_node[node] = NOT_NEGATIVE
            else:
                signs.of_node[node] = _sign(node, signs.of)
    return signs


def _hold(signs: _Signs, node: fx.Node, constant: torch.Tensor) -> None:
    if 0 < constant.numel() <= FEW and not constant.is_complex():
        least = constant.min().item()
        signs.of_node[node] = POSITIVE if least > 0 else NOT_NEGATIVE if least == 0 else ANY
        if bool((constant != 0).all()):
            signs.not_zero.add(node)


def _sign(node: Any, of: Callable[[Any], int]) -> int:
    name, args = operator_name(node), node.args
    if name in LEAST:
        return LEAST[name]
    two = len(args) > 1 and isinstance(args[1], fx.Node)
    if name in ("clamp", "clamp_min"):
        limits = dict(zip(("min", "max"), args[1:], strict=False)) | node.kwargs
        sign = max(of(args[0]), of(limits.get("min")))
        return sign if limits.get("max") is None else min(sign, of(limits["max"]))
    if name == "maximum" or (name == "max" and two):
        return max(of(args[0]), of(args[1]))
    if name in ("where", "minimum") or (name == "min" and two):
        return min(of(args[-1]), of(args[-2]))
    if name in CASTS and _narrows(node):
        return min(of(args[0]), NOT_NEGATIVE)
    if name == "cat":
        return min(map(of, args[0]))
    if name == "add" and node.kwargs.get("alpha", 1) == 1:
        both = of(args[0]), of(args[1])
        return max(both) if min(both) >= NOT_NEGATIVE else ANY
    if name == "mul":
        if args[0] is args[1]:
            return NOT_NEGATIVE
        both = of(args[0]), of(args[1])
        constant = not isinstance(args[1], fx.Node)
        return min(both) if constant else min(*both, NOT_NEGATIVE)  # small numbers may make zero
    if name == "div":
        return min(of(args[0]), NOT_NEGATIVE) if of(args[1]) == POSITIVE else ANY
    if name == "pow":
        even = isinstance(args[1], int | float) and args[1] % 2 == 0
        return NOT_NEGATIVE if even else min(of(args[0]), NOT_NEGATIVE)
    return of(args[0]) if name in SAME else ANY


def _narrows(cast: Any) -> bool:
    """Check whether a cast may make zero of a small number."""
    given, made = cast.args[0].meta["val"].dtype, cast.meta["val"].dtype
    return given.is_floating_point and (not made.is_floating_point or made.itemsize < given.itemsize)


def _makes_nan(node: Any, signs: _Signs) -> bool:
    name = operator_name(node) if node.op == "call_function" else ""
    if name not in WHOLE | PARTIAL or not _is_float(node):
        return False
    given = node.args[0]
    if name in ("div", "true_divide"):
        divisor = node.args[1]
        return signs.of(divisor) != POSITIVE and divisor not in signs.not_zero and not _is_number(divisor)
    if name in ("rsqrt", "reciprocal"):
        return signs.of(given) != POSITIVE
    if name == "pow":
        exponent = node.args[1]
        if isinstance(exponent, int | float) and exponent >= 0 and exponent == int(exponent):
            return False
        return signs.of(given) < (POSITIVE if not _is_number(exponent) or exponent < 0 else NOT_NEGATIVE)
    return name in ("acos", "asin", "acosh", "atanh") or signs.of(given) == ANY


def _is_number(argument: Any) -> bool:
    """A plain number; a division by zero is shown by the example."""
    return isinstance(argument, int | float)


def _dropped(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes behind which an operator comes that drops NaN."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(reader in found or operator_name(reader) in DROPS for reader in node.users):
            found.add(node)
    return found


def _is_wide_cast(node: Any) -> bool:
    if operator_name(node) not in CASTS or not _is_float(node.args[0]):
        return False
    made = node.meta["val"].dtype
    return made != torch.bool and not made.is_floating_point and not made.is_complex


def _arisen(maker: Any, bits: int) -> Any:
    if operator_name(maker) in CASTS:
        return _leaves_range(maker.args[0], torch.iinfo(maker.meta["val"].dtype), bits)
    nan = make_call(aten.isnan.default, maker)
    if operator_name(maker) in WHOLE:
        nan = make_call(aten.logical_or.default, nan, make_call(aten.isinf.default, maker))
    return make_call(aten.any.default, nan)


def _leaves_range(given: fx.Node, info: torch.iinfo, bits: int) -> Any:
    """Check whether a number is beyond an integer type or `bits` bits. PyTorch casts NaN to the least integer."""
    least, most = exact_integers(bits)
    beyond = [
        make_call(aten.isnan.default, given),
        make_call(aten.le.Scalar, given, max(least, info.min) - 1.0),
        make_call(aten.ge.Scalar, given, min(most, info.max) + 1.0),
    ]
    return make_call(aten.any.default, _any_of(beyond))


def _any_of(conditions: Sequence[Any]) -> Any:
    return functools.reduce(functools.partial(make_call, aten.logical_or.default), conditions)


def _is_float(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()
