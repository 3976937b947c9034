# pyright: basic
"""Floor division of integers, which some libraries round toward zero."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from torchwright.optimization.techniques.shared.joining import make_call

aten = torch.ops.aten
DIVISIONS = frozenset([aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode])


def exact_division(program: ExportedProgram) -> None:
    """Replace, in place, each floor division of integers by an exact division of the dividend less the remainder.

    OpenVINO 2026.4 rounds quotients of integers toward zero: `-46 // 6` was -7 for -8. It computes remainders as
    PyTorch does. A quotient without a remainder is the same in either way of rounding.
    """
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if node.target in DIVISIONS and _is_floor(node)]:
        dividend, divisor = node.args[:2]
        remainder = aten.remainder.Tensor if isinstance(divisor, torch.fx.Node) else aten.remainder.Scalar
        with graph.inserting_before(node):
            exact = make_call(aten.sub.Tensor, dividend, make_call(remainder, dividend, divisor))
            quotient = make_call(aten.div.Tensor_mode, exact, divisor, rounding_mode="trunc")
        node.replace_all_uses_with(quotient)
        graph.erase_node(node)
    program.graph_module.recompile()


def _is_floor(node: Any) -> bool:
    value = node.meta["val"]
    floor = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
    return floor and not (value.is_floating_point() or value.is_complex())
