# pyright: basic
"""The facts about a graph's dynamic sizes that a compiler may rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._sympy.value_ranges import ValueRanges

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def widen(program: ExportedProgram, past: int = 0) -> None:
    """Have compilers see the bounds that the graph states, the upper ones larger by `past`.

    torch.export traces every free size as 2 at least, and lets the call's own bounds begin at 1: a compiler that asks
    the trace refuses one row, or plans with more than there is.
    """
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    for size in sizes:
        if isinstance(size, torch.SymInt) and size.node.expr in program.range_constraints:
            symbol = size.node.expr
            stated = program.range_constraints[symbol]
            wider = ValueRanges(stated.lower, stated.upper + past)
            size.node.shape_env.var_to_range[symbol] = program.range_constraints[symbol] = wider
