"""The bias correction of our own 8-bit layers, beside means over the layers' own outputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.techniques.shared.bias_correction import MeanErrors
from torchwright.optimization.techniques.shared.int8 import quantize_weight
from torchwright.workloads.module import ModuleWorkload


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


LAYERS = [
    pytest.param(nn.Conv2d(6, 8, 3, stride=2, padding=1), (6, 9, 9), (0, 2, 3), id="convolution"),
    pytest.param(nn.Conv2d(6, 6, 3, groups=6, bias=False), (6, 9, 9), (0, 2, 3), id="depthwise, no bias"),
    pytest.param(nn.Linear(6, 5), (7, 6), (0, 1), id="linear"),
    pytest.param(nn.Linear(6, 5, bias=False), (6,), (0,), id="linear, no bias"),
]


@pytest.mark.parametrize(("layer", "shape", "others"), LAYERS)
def test_the_shift_is_the_mean_of_what_rounding_takes(layer: Any, shape: Any, others: Any) -> None:
    calls, errors = [torch.rand(rows, *shape) for rows in (4, 9)], MeanErrors()
    with torch.no_grad():
        for x in calls:
            errors.watch(layer, x)
        exact = torch.cat([layer(x) for x in calls])
        integers, scale = quantize_weight(layer.weight)
        layer.weight.copy_(integers * scale.view(-1, *[1] * (integers.dim() - 1)))
        rounded = torch.cat([layer(x) for x in calls])
    shift = errors.shift(layer)
    assert shift is not None
    assert shift.abs().max() > 1e-4
    assert (shift - (exact - rounded).mean(others)).abs().max() < 1e-6


def test_a_corrected_model_has_outputs_of_the_same_mean() -> None:
    """Inputs of one sign, as after a ReLU, and few weights a channel."""
    model = nn.Sequential(nn.Conv2d(32, 32, 3, groups=32, bias=False), nn.ReLU(), nn.Conv2d(32, 16, 1)).eval()
    calls = [(torch.rand(2, 32, 12, 12) + 2,) for _ in range(8)]
    target = make_target(ModuleWorkload(model, calls, metric=lambda _: 0.0), get_device("cpu").identify())
    apply_steps(target, (Step(name="int8_static"), Step(name="compile")))
    layer: Any = target.model.get_submodule("0")
    x = torch.cat([call[0] for call in calls])
    with torch.no_grad():
        error = layer(x) - model[0](x)
        layer.bias.zero_()
        before = layer(x) - model[0](x)
    assert error.mean((0, 2, 3)).abs().max() < 0.2 * before.mean((0, 2, 3)).abs().max()
    assert error.norm() < 0.7 * before.norm()


class Doubled(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_other_layers_and_strange_inputs_give_no_shift() -> None:
    errors, plain = MeanErrors(), nn.Linear(4, 4)
    others = [Doubled(4, 4), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")]
    errors.watch(others[0], torch.rand(3, 4))
    errors.watch(others[1], torch.rand(1, 4, 5, 5))
    errors.watch(plain, torch.tensor([[math.inf, 0.0, 1.0, 2.0]]))
    assert [errors.shift(layer) for layer in (*others, plain, nn.Linear(2, 2))] == [None] * 4
