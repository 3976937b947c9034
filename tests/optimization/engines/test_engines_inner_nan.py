"""NaN that arises inside a graph from finite inputs, where another library's next operator would drop it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export
from torch.nn import functional as F

from converted_models import needs, prepared
from torchwright.optimization.engines.rewrites.inner_nan import flag_nan, nan_makers
from torchwright.workloads.base import Case

Function = Callable[[torch.Tensor], torch.Tensor]


class Of(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(6, 6)
        self.register_buffer("scale", torch.rand(6) + 0.5)

    def forward(self, x: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor]:
        return "scores", x.argmax(-1), self.layer(self.function(x))


HIDDEN: dict[str, tuple[Function, float]] = {
    "division by a norm": (lambda x: (x / x.norm(dim=-1, keepdim=True)).relu(), 0),
    "an infinity times zero": (lambda x: (x * x.square().mean(-1, keepdim=True).rsqrt()).clamp(-9, 9), 0),
    "standardized": (lambda x: F.gelu((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)), 3),
    "a root": (lambda x: torch.maximum(x.sqrt(), x * 0), -1),
    "a power": (lambda x: x.pow(0.3).relu(), -1),
    "a logarithm": (lambda x: x.log().softmax(-1), -1),
    "an arc": (lambda x: x.acos().relu(), 2),
    "a largest number": (lambda x: (x / x.amax(-1, keepdim=True)).clamp(0, 2), 0),
}
"""Function → a number that makes NaN inside, in a whole row."""
SAFE: dict[str, Function] = {
    "normalized": lambda x: F.normalize(x, dim=-1).relu(),
    "RMS": lambda x: (x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).relu(),
    "layer norm": lambda x: F.layer_norm(x, [6]).relu(),
    "a number": lambda x: (x / 3).relu(),
    "a mean over a mask": lambda x: (x / (x > 0).sum(-1, keepdim=True).clamp(min=1)).relu(),
    "a root of squares": lambda x: (x * x).sum(-1, keepdim=True).sqrt().relu() * x,
    "an even power": lambda x: x.pow(2).relu(),
    "no operator that drops it": lambda x: x / x.norm(dim=-1, keepdim=True),
    "shifted": lambda x: (x / (x.exp() + 1)).relu(),
    "the larger of two": lambda x: (x / torch.max(x.exp() + 1, x)).relu(),
    "a count": lambda x: (x / (x > 0).sum(-1, keepdim=True).clamp(min=1).float()).relu(),
    "one plus": lambda x: x.abs().log1p().relu(),
}


UNPROVED: dict[str, Function] = {
    "the lesser of two": lambda x: x / torch.min(x.exp() + 1, x),
    "a difference by alpha": lambda x: x / torch.add(x.exp() + 1, x.exp() + 1, alpha=-1),
    "a limit above": lambda x: x / (x.abs() + 1).clamp(max=0),
    "a cast to integers": lambda x: x / (x.abs() + 0.1).long(),
    "a cast to a narrower type": lambda x: x / (x.abs() + 1e-12).half(),
    "numbers from below zero": lambda x: (x.square() + torch.arange(-5.0, 1)).sqrt(),
}
"""Functions whose operand is zero or negative for some numbers, which no rule may prove otherwise."""


def x_with(row: float) -> torch.Tensor:
    x = torch.rand(4, 6) * 0.8 + 0.1
    x[1] = row
    return x


@pytest.mark.parametrize("name", HIDDEN)
def test_nan_from_inside_reaches_one_result_whole(name: str) -> None:
    function, row = HIDDEN[name]
    model, x = Of(function).eval(), torch.rand(4, 6) * 0.8 + 0.1
    program = export(model, (x,))
    makers = nan_makers(program)
    assert flag_nan(program, makers) == 1, "among the tensors"
    run = program.module()
    found, wanted = run(x), model(x)
    assert found[0] == "scores"
    torch.testing.assert_close(found[1:], wanted[1:])
    assert bool(run(x_with(row))[2].isnan().all())


@pytest.mark.parametrize("name", UNPROVED)
def test_what_may_be_zero_or_negative_is_not_proved_positive(name: str) -> None:
    program = export(Of(lambda x: UNPROVED[name](x).float().relu()).eval(), (torch.rand(4, 6),))
    assert nan_makers(program)


@pytest.mark.parametrize("name", SAFE)
def test_a_graph_that_makes_none_stays(name: str) -> None:
    x = torch.rand(4, 6)
    assert not nan_makers(export(Of(SAFE[name]).eval(), (x,)))


class Classes(nn.Module):
    """Returns no floating-point number."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str, torch.Tensor]:
        share = x / x.sum(-1, keepdim=True)
        return share.argmax(-1), "larger", share > 0.5


def test_a_graph_without_a_number_to_mark_gets_one_more_result() -> None:
    x = torch.rand(4, 6)
    program = export(Classes(), (x,))
    assert flag_nan(program, nan_makers(program)) == 2, "behind the tensors"
    found = program.graph_module(x), program.graph_module(x_with(0))
    assert [bool(results[-1].isnan()) for results in found] == [False, True]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_classes_and_comparisons_of_such_a_call_are_handed_over(engine: str) -> None:
    needs(engine)
    run = prepared([engine], Classes().eval(), torch.rand(4, 6))
    for given in (torch.rand(4, 6), x_with(0), torch.rand(3, 6)):
        found, wanted = run(Case(name="forward", args=(given,))), Classes()(given)
        assert found[1] == "larger"
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[2], wanted[2])


class Whole(nn.Module):
    """Casts numbers, and computes with the integers (openvino#35896)."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x.long(), (x * 100).int() % 7, x.abs().to(torch.uint8) * 1.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [1.0, 99.0, 3e6, 1e12, 5e18, float("nan")])
def test_numbers_beyond_the_engines_integers_are_handed_over(
    whole: Callable[[Case], Any], size: float
) -> None:
    x = torch.tensor([[0.25, 1.0], [0.5, -2.0]]) * size
    for found, wanted in zip(whole(Case(name="forward", args=(x,))), Whole()(x), strict=True):
        assert torch.equal(found, wanted)


@pytest.fixture(scope="module")
def whole() -> Callable[[Case], Any]:
    needs("openvino")
    return prepared(["openvino"], Whole().eval(), torch.rand(2, 2) * 9)


class Remainders(nn.Module):
    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return ids % 7, ids > ids - 1, ids.amax(-1)


@pytest.mark.filterwarnings("ignore")
def test_integers_that_float32_does_not_hold_are_handed_over() -> None:
    """OpenVINO computes integers in float32 in many operators: 20,000,001 % 7 was 0."""
    needs("openvino")
    run = prepared(["openvino"], Remainders().eval(), torch.arange(8).reshape(2, 4))
    for most in (100, 2**24, 2**31, 2**62):
        ids = torch.arange(most - 8, most).reshape(2, 4)
        for found, wanted in zip(run(Case(name="forward", args=(ids,))), Remainders()(ids), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore")  # in a trial's process nobody sees what libraries say
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("name", HIDDEN)
def test_an_engine_hands_such_a_call_over(name: str, engine: str) -> None:
    needs(engine)
    function, row = HIDDEN[name]
    model, x = Of(function).eval(), torch.rand(4, 6) * 0.8 + 0.1
    run = prepared([engine], model, x)
    for given in (x, x_with(row)):
        found, wanted = run(Case(name="forward", args=(given,))), model(given)
        torch.testing.assert_close(found[2], wanted[2], equal_nan=True, rtol=1e-4, atol=1e-4)
