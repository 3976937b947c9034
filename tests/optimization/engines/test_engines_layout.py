"""Linear layers read rows that lie one after another, whatever lies before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.compiled.packaging import rewritten
from torchwright.optimization.engines.compiled.program import export
from torchwright.optimization.engines.rewrites.layout import lay_out_rows
from torchwright.workloads.module import ModuleWorkload

aten = torch.ops.aten


class Turned(nn.Module):
    """A linear layer on tokens first, as torch's attention calls it; then one on rows as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x_BTE.transpose(0, 1)))


def exported(model: nn.Module, x: torch.Tensor, shapes: Any = None) -> torch.export.ExportedProgram:
    return torch.export.export(model.eval(), (x,), strict=False, dynamic_shapes=shapes)


@pytest.mark.parametrize("free", [False, True])
def test_scattered_rows_are_copied_and_others_are_not(free: bool) -> None:
    torch.manual_seed(0)
    model, x = Turned(), torch.randn(3, 5, 8)
    shapes = ({0: torch.export.Dim("rows", min=2)},) if free else None
    program = exported(model, x, shapes)
    lay_out_rows(program.graph_module)
    layers: list[Any] = [node for node in program.graph.nodes if node.target is aten.linear.default]
    first, second = layers
    assert first.args[0].target is aten.clone.default
    assert first.args[0].meta["val"].is_contiguous()
    assert second.args[0] is first
    torch.testing.assert_close(program.module()(x), model(x))


def test_matrices_and_rows_side_by_side_stay() -> None:
    model = nn.Linear(8, 4)
    for x in (torch.randn(8, 6).t(), torch.randn(2, 3, 8)):
        program = exported(model, x)
        lay_out_rows(program.graph_module)
        assert not any(node.target is aten.clone.default for node in program.graph.nodes)


def test_integers_are_read_as_they_lie() -> None:
    """A copy between the integers and their layer would hide the pattern that Inductor looks for."""
    target = make_target(ModuleWorkload(Turned(), torch.randn(3, 5, 8)), get_device("cpu").facts())
    apply_steps(target, [Step(name="int8_static"), Step(name="compile")])
    programs = export(target.model, target.workload.graphs(torch.float32))
    (program,) = [rewritten(program, target.settings) for program in programs.values()]
    layers: list[Any] = [node for node in program.graph.nodes if node.target is aten.linear.default]
    assert len(layers) == 2
    assert not any(layer.args[0].target is aten.clone.default for layer in layers)
