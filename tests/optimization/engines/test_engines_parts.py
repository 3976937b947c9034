"""Layers ranked by their part in a model's error, where the errors of layers add up as squares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.engines.sensitivity import _measured_groups, rank_modules
from torchwright.optimization.techniques.base import parse_step
from torchwright.workloads.module import ModuleWorkload


class Branches(nn.Module):
    """Forty layers side by side; what the last ten give counts thirty times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(40))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [layer(self.norm(x)) * (30.0 if i >= 30 else 1.0) for i, layer in enumerate(self.layers)]
        return torch.cat(found, -1)


def test_parts_are_those_of_the_whole_and_the_largest_come_first() -> None:
    model, x = Branches().eval(), torch.randn(32, 64)
    target = make_target(ModuleWorkload(model, x), get_device("cpu").identify())
    ranking = rank_modules(target, (Step(name="dtype", options={"autocast": True}),))
    assert sorted(each.name for each in ranking) == sorted(f"layers.{i}" for i in range(40))
    errors = [each.error for each in ranking]
    assert errors == sorted(errors, reverse=True)
    assert {each.name for each in ranking[:10]} == {f"layers.{i}" for i in range(30, 40)}
    with torch.no_grad():
        exact = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            found = [
                layer(model.norm(x)).float() * (30.0 if i >= 30 else 1.0)
                for i, layer in enumerate(model.layers)
            ]
    whole = ((torch.cat(found, -1) - exact).norm() / exact.norm()).item()
    assert math.hypot(*errors) / whole == pytest.approx(1.0, rel=0.02)
    assert not model.layers[0]._forward_hooks


class Spare(nn.Module):
    """Has a layer that its calls leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize(
    "step", ["dtype:autocast=true", "openvino:precision=bf16,autocast=true", "openvino:precision=int8"]
)
def test_what_is_not_called_has_no_part(step: str) -> None:
    target = make_target(ModuleWorkload(Spare().eval(), torch.randn(4, 16)), get_device("cpu").identify())
    ranking = rank_modules(target, (parse_step(step),))
    assert [each.name for each in ranking] == ["used"]
    assert 1e-4 < ranking[0].error < 3e-2


NAMES = [f"layer{i}" for i in range(40)]


def test_the_worst_groups_are_halved_until_single_layers_are_found() -> None:
    squares = {name: 100.0 if name == "layer17" else 1.0 for name in NAMES}
    asked: list[Sequence[str]] = []

    def error(group: Sequence[str]) -> float:
        asked.append(group)
        return math.sqrt(sum(squares[name] for name in group))

    found = {tuple(group): value for group, value in _measured_groups(NAMES, error, 60.0)}
    assert found == {(name,): math.sqrt(square) for name, square in squares.items()}
    assert ["layer17"] in asked[: 4 + 2 * 4]  # ten layers, five, two, one


@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_a_few_groups_are_measured_however_little_time_there_is(count: int) -> None:
    found = _measured_groups(NAMES[:count], len, 0.0)
    assert [name for group, _ in found for name in group] == NAMES[:count]
    assert len(found) == min(count, 4)


class Ends(nn.Module):
    """Two layers whose rounding weighs the same; one takes 64 times the work of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x)
        return torch.cat([wide / wide.norm(), self.narrow(x) / self.narrow(x).norm()], -1)


def test_of_equal_errors_the_layer_that_takes_less_time_comes_first() -> None:
    target = make_target(ModuleWorkload(Ends().eval(), torch.randn(256, 64)), get_device("cpu").identify())
    ranking = rank_modules(target, (parse_step("openvino:precision=int8"),))
    assert [each.name for each in ranking] == ["narrow", "wide"]
    assert ranking[0].error == pytest.approx(ranking[1].error, rel=0.5)
