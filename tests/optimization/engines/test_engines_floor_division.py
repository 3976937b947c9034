"""Floor divisions of integers in graphs for other libraries: rounded down, as in PyTorch, whatever the signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

from converted_models import needs, prepared
from torchwright.optimization.engines.rewrites.floor_division import exact_division
from torchwright.workloads.base import Case

FLOORED: dict[str, Callable[..., torch.Tensor]] = {
    "operator": lambda a, b: a // b,
    "number": lambda a, b: a // -7 + b * 0,
    "div": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div by a number": lambda a, b: torch.div(a, 7, rounding_mode="floor") + b * 0,
}
ROUNDED: dict[str, Callable[..., torch.Tensor]] = {
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "true": lambda a, b: a / b,
    "floats": lambda a, b: a.float() // b,
}


class Of(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.function(a, b)


def integers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-50, 50, (4, 200)), torch.randint(1, 9, (4, 200)) * torch.tensor(
        [[1], [-1], [1], [-1]]
    )


def divisions(program: Any) -> list[Any]:
    return [
        node.kwargs.get("rounding_mode", "floor") for node in program.graph.nodes if "div" in str(node.target)
    ]


@pytest.mark.parametrize("name", FLOORED)
def test_integers_are_divided_exactly(name: str):
    program = export(Of(FLOORED[name]), integers())
    exact_division(program)
    assert divisions(program) == ["trunc"]
    given = integers()
    assert torch.equal(program.module()(*given), FLOORED[name](*given))


@pytest.mark.parametrize("name", ROUNDED)
def test_other_divisions_stay(name: str):
    program = export(Of(ROUNDED[name]), integers())
    before = [node.target for node in program.graph.nodes]
    exact_division(program)
    assert [node.target for node in program.graph.nodes] == before


@pytest.mark.filterwarnings("ignore")  # in a trial's process nobody sees what libraries say
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("name", FLOORED)
def test_an_engine_rounds_down(name: str, engine: str):
    needs(engine)
    a, b = integers()
    run = prepared([engine], Of(FLOORED[name]), a, b)
    other_a, other_b = integers()
    other = other_a.clamp(a.min(), a.max()), other_b.clamp(b.min(), b.max())
    for given in ((a, b), other):
        assert torch.equal(run(Case(name="forward", args=given)), FLOORED[name](*given))
