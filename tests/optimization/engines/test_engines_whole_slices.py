"""Slices of a whole dimension vanish from an exported graph, whose answers and in-place writes stay the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from torchwright.optimization.engines.rewrites.whole_slices import SLICE, remove_whole_slices


class Sliced(nn.Module):
    """Writes into slices of joined channels, as GhostNet adds its shortcut."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined = torch.cat([x, x], 1)[:, :8]
        joined += y
        part = joined[1:, :4]
        part *= 3
        return joined, part, joined[:, -2:], joined[:, ::2], joined[:]


def exported(rows: bool):
    free = {0: Dim.AUTO} if rows else None
    given = torch.randn(3, 4), torch.randn(3, 8)
    return export(Sliced(), given, dynamic_shapes=(free, free) if rows else None)


@pytest.mark.parametrize("rows", [False, True])
def test_answers_stay_the_same(rows: bool):
    program = exported(rows)
    remove_whole_slices(program)
    for count in (3, 4, 7) if rows else (3,):
        given = torch.randn(count, 4), torch.randn(count, 8)
        given[0][0] = float("nan")
        wanted, found = Sliced()(*given), program.module()(*given)
        assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(wanted, found, strict=True))


# of torch's own specs, where a program is copied
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_no_scatter_is_left_of_a_write_to_a_whole_slice():
    program = exported(rows=True)
    scatters = [torch.ops.aten.slice_scatter.default]

    def written() -> int:
        graph = program.run_decompositions().graph_module.graph
        return sum(node.target in scatters for node in graph.nodes)

    before = written()
    remove_whole_slices(program)
    assert written() < before
    ranges = [node.args[2:4] for node in program.graph_module.graph.nodes if node.target is SLICE]
    assert (1, torch.iinfo(torch.int64).max) in ranges, "a part of the rows is still a slice"
