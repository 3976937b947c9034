# pyright: basic
"""Layouts that Inductor lowers badly, mended in the exported graph before it is compiled."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch._inductor.inductor_prims  # registers the operator that says how a value lies
from torch.fx import GraphModule, Node

aten = torch.ops.aten
ROW_BY_ROW = torch.ops.prims.inductor_force_stride_order.default
DEQUANTIZED = "quantized_decomposed.dequantize"
"""Operators around which Inductor matches patterns; a copy in between would hide them."""


def lay_out_rows(graph_module: GraphModule) -> None:
    """Copy what a linear layer reads, (..., K) with several leading sizes, where it does not lie row after row.

    torch multiplies such an input slice by slice, for which oneDNN writes out the weight once a slice: 200 MB a call
    for (128, 8, 512) and 1,536 features in bfloat16. The copy of the input is small, and joins the code that computes
    the input.
    """
    for node in list(graph_module.graph.nodes):
        if node.target is not aten.linear.default:
            continue
        rows = node.args[0]
        value = rows.meta["val"]
        if value.dim() < 3 or value.is_contiguous() or str(rows.target).startswith(DEQUANTIZED):
            continue
        with graph_module.graph.inserting_before(node):
            layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
            copy = graph_module.graph.call_function(aten.clone.default, (rows,), layout)
        copy.meta["val"] = value.contiguous()
        node.update_arg(0, copy)
    graph_module.recompile()


def lay_out_additions(graph_module: GraphModule) -> None:
    """Let an 8-bit linear layer read what is added to its output row after row.

    Inductor fuses the addition wherever the other operand lies, and oneDNN takes its reference kernel where that is not
    row after row: 6 s for 0.8 ms of 256 rows of 768 features (torch 2.13, a Zen 4). A picture's patches, which a
    convolution makes and a transformer transposes, may lie like that through all of its residual additions. Inductor
    copies only what lies otherwise when it is compiled, which its layout in eager PyTorch does not tell.
    """
    for node in list(graph_module.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) < 2:
            continue
        for layer, value in (node.args, node.args[::-1]):
            if _is_8_bit(layer) and isinstance(value, Node) and not _is_8_bit(value):
                alike = value.meta["val"].shape == layer.meta["val"].shape
                if alike and not str(value.target).startswith(DEQUANTIZED):
                    node.replace_input_with(value, _row_by_row(value, node))
                break
    graph_module.recompile()


def _is_8_bit(node: Any) -> bool:
    """Check whether a node is a linear layer's output computed from integers."""
    node = _before_casts(node)
    if not isinstance(node, Node) or node.target is not aten.linear.default:
        return False
    return str(_before_casts(node.args[0]).target).startswith(DEQUANTIZED)


def _before_casts(node: Any) -> Any:
    while isinstance(node, Node) and node.target is aten._to_copy.default:
        node = node.args[0]
    return node


def _row_by_row(value: Node, reader: Node) -> Node:
    shape = value.meta["val"].shape
    with value.graph.inserting_before(reader):
        strides: list[int | Node] = [1]
        for dim in range(len(shape) - 1, 0, -1):
            strides.insert(0, _times(strides[0], _size(value, dim)))
        made = value.graph.call_function(ROW_BY_ROW, (value, strides))
    made.meta["val"] = value.meta["val"].contiguous()
    return made


def _size(value: Node, dim: int) -> int | Node:
    size = value.meta["val"].shape[dim]
    if isinstance(size, int):
        return size
    node = value.graph.call_function(aten.sym_size.int, (value, dim))
    node.meta["val"] = size
    return node


def _times(one: int | Node, other: int | Node) -> int | Node:
    """A product of sizes, which are nodes where they are free."""
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    if isinstance(one, int):
        one, other = other, one
    assert isinstance(one, Node)
    product = one.graph.call_function(operator.mul, (one, other))
    product.meta["val"] = one.meta["val"] * (other.meta["val"] if isinstance(other, Node) else other)
    return product
