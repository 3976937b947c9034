# pyright: basic
"""Slices of an exported graph that take a whole dimension."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.export import ExportedProgram

SLICE = torch.ops.aten.slice.Tensor


def remove_whole_slices(program: ExportedProgram) -> None:
    """Replace, in place, each slice of a whole dimension by its input.

    torch.export drops those of fixed sizes. With a dynamic batch size `x[:, :n] += y` keeps one, from which
    functionalization makes a `slice_scatter` and OpenVINO a scatter of the whole tensor: GhostNetV2 took 1.4 times as
    long. A whole slice is the same memory as its input, so writes to either are writes to both.
    """
    graph = program.graph_module.graph
    nodes: list[Any] = graph.find_nodes(op="call_function", target=SLICE)
    outputs = {node for output in graph.find_nodes(op="output") for node in output.all_input_nodes}
    for node in nodes:
        if node not in outputs and _is_whole(*node.args, **node.kwargs):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    program.graph_module.recompile()


def _is_whole(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> bool:
    if start not in (None, 0) or step != 1:
        return False
    size = x.meta["val"].shape[dim]
    if end is None:
        return True
    if not isinstance(end, int):
        return False  # a size of the graph's own, which may be another one
    return end == sys.maxsize or (isinstance(size, int) and end >= size)
