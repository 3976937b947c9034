# pyright: basic
"""Layouts that Inductor lowers badly, mended in the exported graph before it is compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

aten = torch.ops.aten
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
