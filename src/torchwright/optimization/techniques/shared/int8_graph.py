"""Whole-graph passes over the modules of `int8.py`: decide which values are read as integers.

`share_integers(graph)` lets readers of one value share one quantization. A residual addition next to an 8-bit layer
reads the integers that the next layer reads. Inductor then fuses addition, activation and re-quantization into
the layer, and writes no float copy of the activation. PT2E's quantizer arranges the same by annotation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

ops = torch.ops.quantized_decomposed
aten = torch.ops.aten
QUANTIZE, DEQUANTIZE = ops.quantize_per_tensor.default, ops.dequantize_per_tensor.default
POOL = aten.max_pool2d.default
PADS = (aten.pad.default, aten.constant_pad_nd.default)
LAYERS = (aten.conv2d.default, aten.linear.default)


def share_integers(graph_module: GraphModule) -> None:
    """Rewrite a functional graph in place; values and their types stay as they were but for the shared rounding."""
    graph = graph_module.graph
    _share_products(graph)
    for node in list(graph.nodes):
        if node.op != "placeholder":
            _share_quantization(node)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target is POOL:
            _pool_integers(node)
        if node.target is aten.add.Tensor:
            _read_integers(node)
    graph.eliminate_dead_code()
    graph.lint()
    graph_module.recompile()


def keep_not_finite(graph_module: GraphModule) -> None:
    """Rewrite a graph in place so that NaN and infinity become NaN, which 8-bit integers turn into plausible numbers.

    For graphs that are run operator by operator: compilers recognize the pattern without this alone.
    """
    graph = graph_module.graph
    for wide in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        value = _quantized_value(wide.args[0])
        if value is None:
            continue
        with graph.inserting_before(wide):
            finite = graph.call_function(aten.isfinite.default, (value,))
        with graph.inserting_after(wide):
            kept = graph.call_function(aten.where.ScalarOther, (finite, wide, math.nan))
        wide.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    graph_module.recompile()


def _quantized_value(integers: Any) -> Node | None:
    """Return the value that was rounded to these integers, pooled or padded as they were; None for constants."""
    if integers.target is QUANTIZE:
        return integers.args[0]
    if integers.target not in (POOL, *PADS) or integers.args[0].target is not QUANTIZE:
        return None
    graph, value = integers.graph, integers.args[0].args[0]
    with graph.inserting_before(integers):
        if integers.target is POOL:
            return graph.call_function(POOL, (value, *integers.args[1:]), integers.kwargs)
        return graph.call_function(integers.target, (value, integers.args[1]))


def _share_products(graph: Graph) -> None:
    """Multiply a value once for all quantizations that read equal products, as smoothed layers do."""
    first: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        product = node.target is aten.mul.Tensor and all(user.target is QUANTIZE for user in node.users)
        cast = node.target is aten._to_copy.default and node.args[0].op in ("placeholder", "get_attr")
        if not product and not cast:
            continue
        known = first.setdefault((node.target, node.args, tuple(node.kwargs.items())), node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _share_quantization(value: Node) -> None:
    """One quantize and one dequantize for all readers of `value` that ask for the same integers."""
    first: dict[tuple[object, ...], tuple[Node, Node]] = {}
    for quantize in [user for user in value.users if user.target is QUANTIZE]:
        pair = _dequantized(quantize)
        if pair is None:
            continue
        known = first.setdefault(tuple(quantize.args[1:]), (quantize, pair))
        if known[0] is quantize:
            value.append(quantize)
            quantize.append(pair)
        else:
            pair.replace_all_uses_with(known[1])


def _pool_integers(pool: Node) -> None:
    """Take the maximum over integers if only integers are read from it: rounding keeps the order of values, so the
    results are equal, and the layer before the pooling writes them directly."""
    quantize = next(iter(pool.users))
    if len(pool.users) > 1 or quantize.target is not QUANTIZE:
        return
    value = pool.args[0]
    assert isinstance(value, Node)
    with pool.graph.inserting_before(pool):
        integers = pool.graph.call_function(QUANTIZE, (value, *quantize.args[1:]))
        pooled = pool.graph.call_function(POOL, (integers, *pool.args[1:]), pool.kwargs)
    integers.meta["val"] = value.meta["val"].to(torch.uint8)
    pooled.meta["val"] = quantize.meta["val"]
    quantize.replace_all_uses_with(pooled)


def _read_integers(addition: Node) -> None:
    """Let an addition with an 8-bit layer's output read the integers of its other operand, if the sum is read only as
    integers.

    Inductor fuses the sum in place of the dequantized operand. In a bfloat16 model it takes the result for float32,
    like that operand: the operator's meta function returns its dtype, whatever `output_dtype` says. A bfloat16
    convolution that reads it has its weight, packed for bfloat16, cast to float32 and read in float32's order.
    """
    if len(addition.args) < 2 or addition.kwargs or not _ends_in_integers(addition):
        return
    for value, other in (addition.args, addition.args[::-1]):
        if not isinstance(value, Node) or not isinstance(other, Node) or not _is_layer(other):
            continue
        quantized = next((user for user in value.users if user.target is QUANTIZE), None)
        wide = _dequantized(quantized) if quantized is not None else None
        if wide is None or value.op == "placeholder" or value.meta["val"].shape != other.meta["val"].shape:
            continue
        before = addition.meta["val"]
        addition.replace_input_with(value, wide)
        if before.dtype != torch.float32:
            _narrow_again(addition, before)
        return


def _narrow_again(addition: Node, before: torch.Tensor) -> None:
    """Give the readers of an addition that is float32 now the type they had."""
    with addition.graph.inserting_after(addition):
        narrow = addition.graph.call_function(aten._to_copy.default, (addition,), {"dtype": before.dtype})
    addition.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)
    narrow.meta["val"], addition.meta["val"] = before, before.to(torch.float32)


def _ends_in_integers(addition: Node) -> bool:
    """Check whether the only reader of a sum, or of its relu, is a quantization."""
    reader = _only_reader(addition)
    if reader is not None and reader.target is aten.relu.default:
        reader = _only_reader(reader)
    return reader is not None and reader.target is QUANTIZE


def _only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _dequantized(quantize: Node) -> Node | None:
    return next((user for user in quantize.users if user.target is DEQUANTIZE), None)


def _is_layer(node: Node) -> bool:
    """Check whether a node is a layer whose own input came from integers."""
    node = _before_casts(node)
    return node.target in LAYERS and _before_casts(node.args[0]).target is DEQUANTIZE


def _before_casts(node: Any) -> Any:
    while node.target is aten._to_copy.default:
        node = node.args[0]
    return node
