"""Rounding by the covariance of inputs, beside errors of the layers' own outputs and a search through all roundings."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from calibrated_layers import calibrated_on
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.techniques.shared import rounding
from torchwright.optimization.techniques.shared.int8 import RoundedWeight, largest_weight, quantize_weight
from torchwright.optimization.techniques.shared.rounding import (
    Calibrated,
    Moments,
    convolution_patches,
    patches_of,
    round_by,
)
from torchwright.workloads.module import ModuleWorkload


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


LAYERS = [
    pytest.param(nn.Conv2d(6, 8, 3, stride=2, padding=1), (6, 9, 9), (0, 2, 3), id="convolution"),
    pytest.param(nn.Conv2d(6, 6, 3, groups=6, bias=False), (6, 9, 9), (0, 2, 3), id="depthwise, no bias"),
    pytest.param(
        nn.Conv2d(6, 4, (1, 3), groups=2, dilation=(1, 2), padding=(0, 2)), (6, 9, 9), (0, 2, 3), id="groups"
    ),
    pytest.param(nn.Linear(6, 5), (7, 6), (0, 1), id="linear"),
    pytest.param(nn.Linear(6, 5, bias=False), (6,), (0,), id="linear, no bias"),
]


def wide(layer: Any, rounded: RoundedWeight) -> torch.Tensor:
    return rounded.integers * rounded.scale.view(-1, *[1] * (layer.weight.dim() - 1))


def calibrated(layer: nn.Module, calls: list[torch.Tensor]) -> RoundedWeight:
    found = Calibrated()
    for x in calls:
        found.watch(layer, x)
    rounded = found.rounded(layer)
    assert rounded is not None
    return rounded


@pytest.mark.parametrize(("layer", "shape", "others"), LAYERS)
def test_patches_times_weights_are_the_layers_output(layer: Any, shape: Any, others: Any) -> None:
    x = torch.randn(3, *shape)
    groups = getattr(layer, "groups", 1)
    weight_GNK = layer.weight.detach().reshape(groups, len(layer.weight) // groups, -1)
    with torch.no_grad():
        y = layer(x) - layer(torch.zeros_like(x))
    expected = (y.movedim(1, -1) if y.dim() == 4 else y).reshape(-1, len(layer.weight))
    found = (patches_of(layer, x) @ weight_GNK.mT).transpose(0, 1).flatten(1)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("layer", "shape", "others"), LAYERS)
def test_the_mean_is_kept_and_the_rest_of_the_error_is_no_larger(layer: Any, shape: Any, others: Any) -> None:
    """On the calibration calls, against rounding to the nearest."""
    calls = [torch.rand(rows, *shape) + torch.rand(rows, *[1] * len(shape)) for rows in (4, 9)]
    rounded = calibrated(layer, calls)
    integers, scale = quantize_weight(layer.weight, largest_weight())
    nearest = RoundedWeight(integers=integers, scale=scale, shift=torch.zeros(len(scale)))
    errors = []
    with torch.no_grad():
        exact = torch.cat([layer(x) for x in calls])
        for each in (rounded, nearest):
            kept = layer.weight.clone()
            layer.weight.copy_(wide(layer, each))
            errors.append(torch.cat([layer(x) for x in calls]) - exact)
            layer.weight.copy_(kept)
    mean = errors[0].mean(others)
    assert (mean + rounded.shift).abs().max() < 1e-6
    deviations = [error.var(others, unbiased=False) for error in errors]
    assert (deviations[0] <= deviations[1] * 1.0001 + 1e-12).all()
    assert rounded.integers.abs().max() <= largest_weight()


def test_a_depthwise_convolution_loses_a_fraction_where_its_inputs_go_together() -> None:
    """Pixels of a picture: a common value and a little of their own."""
    layer = nn.Conv2d(16, 16, 3, groups=16)
    calls = [torch.rand(8, 16, 1, 1) * 3 + 0.3 * torch.rand(8, 16, 12, 12) for _ in range(4)]
    rounded, (integers, scale) = calibrated(layer, calls), quantize_weight(layer.weight, largest_weight())
    fresh = torch.rand(8, 16, 1, 1) * 3 + 0.3 * torch.rand(8, 16, 12, 12)

    def spread(weight: torch.Tensor) -> float:
        error = F.conv2d(fresh, weight - layer.weight, groups=16)
        return (error - error.mean((0, 2, 3), keepdim=True)).norm().item()

    with torch.no_grad():
        assert spread(wide(layer, rounded)) < 0.4 * spread(integers * scale.view(-1, 1, 1, 1))


def test_one_scale_is_as_good_as_most_of_all_roundings() -> None:
    """Beside every way to round each of seven weights up or down, without other scales."""
    weight_GNK, moments = torch.randn(1, 5, 7), Moments(convolves=False)
    moments.add((torch.randn(1, 4000, 3) @ torch.randn(3, 7)) + 0.2 * torch.randn(1, 4000, 7))
    integers, scale = round_by(weight_GNK, moments, 127, scales=1)
    covariance = moments.covariance_GKK
    assert covariance is not None
    for row in range(5):
        weight, step = weight_GNK[0, row].double(), scale[0, row].double()
        below = torch.floor(weight / step)
        missing = torch.stack(
            [weight - (below + torch.tensor(up)) * step for up in itertools.product((0.0, 1.0), repeat=7)]
        )
        all_errors = ((missing @ covariance[0]) * missing).sum(1)
        own = weight - integers[0, row] * step
        assert (all_errors < own @ covariance[0] @ own * 0.999).double().mean() < 0.25


def test_a_linear_layer_loses_a_fraction_where_its_features_go_together() -> None:
    """300 features of 40 degrees of freedom, more than one block of weights; judged on fresh rows."""
    layer, mixing = nn.Linear(300, 32), torch.randn(40, 300)
    fresh = torch.randn(500, 40) @ mixing
    rounded = calibrated(layer, [torch.randn(1000, 40) @ mixing for _ in range(4)])
    integers, scale = quantize_weight(layer.weight, largest_weight())
    exact = fresh @ layer.weight.T
    with torch.no_grad():
        errors = [
            (fresh @ weight.T - exact).norm() for weight in (wide(layer, rounded), integers * scale[:, None])
        ]
    assert errors[0] < 0.5 * errors[1]


def test_blocks_of_weights_are_rounded_as_one_after_another_is() -> None:
    """Against the correction of all later weights by each one."""
    weight_GNK, moments = torch.randn(2, 5, 300), Moments(convolves=False)
    moments.add(torch.randn(2, 900, 60) @ torch.randn(2, 60, 300) + 0.5 * torch.randn(2, 900, 300))
    covariance = moments.covariance_GKK
    assert covariance is not None
    integers, scale = round_by(weight_GNK, moments, 127)
    variance = covariance.diagonal(dim1=1, dim2=2).mean(1).double()
    damping = (300 / 900) * variance[:, None, None] * torch.eye(300)
    lower = torch.linalg.cholesky(covariance.double() + damping)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(lower)).mT
    wide = weight_GNK.double().clone()
    expected = torch.zeros_like(wide)
    for k in range(300):
        expected[..., k] = torch.round(wide[..., k] / scale).clamp(-127, 127)
        error = (wide[..., k] - expected[..., k] * scale) / upper[:, k, k, None]
        wide[..., k + 1 :] -= error[..., None] * upper[:, None, k, k + 1 :]
    assert (integers != expected).double().mean() < 0.15  # a tie changes what follows it in its row

    def loss(found: torch.Tensor) -> float:
        missing = weight_GNK.double() - found * scale[..., None]
        return ((missing @ covariance.double()) * missing).sum().item()

    assert loss(integers) == pytest.approx(loss(expected), rel=0.02)


def test_seven_bits_stay_in_seven_bits() -> None:
    moments = Moments(convolves=False)
    moments.add(torch.rand(2, 500, 9))
    integers, scale = round_by(torch.randn(2, 3, 9), moments, largest=63)
    assert integers.abs().max() <= 63
    assert integers.abs().amax(2).min() >= 55
    assert scale.shape == (2, 3)


def test_many_weights_and_few_rows_are_rounded_to_the_nearest() -> None:
    layer = nn.Conv2d(8, 4, 3)
    calls = [torch.rand(500, 8, 3, 3)]
    rounded, (integers, scale) = calibrated(layer, calls), quantize_weight(layer.weight, largest_weight())
    assert torch.equal(rounded.integers, integers)
    assert torch.equal(rounded.scale, scale)
    layer = nn.Linear(300, 4)  # a single row says nothing of what goes together
    rounded, (integers, _) = (
        calibrated(layer, [torch.rand(1, 300)]),
        quantize_weight(layer.weight, largest_weight()),
    )
    assert torch.equal(rounded.integers, integers)


def test_moments_are_those_of_all_rows_together() -> None:
    rows, moments = torch.randn(1, 700, 5) * 3 + 100, Moments(convolves=False)
    for part in rows.split(190, dim=1):
        moments.add(part)
    assert moments.covariance_GKK is not None
    assert (moments.mean_GK - rows.double().mean(1)).abs().max() < 1e-5
    assert (moments.covariance_GKK - torch.cov(rows[0].double().T, correction=0)).abs().max() < 1e-4


def test_of_many_patches_some_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "ROWS", 100)
    monkeypatch.setattr(rounding, "PLACES", 100)
    layer = nn.Conv2d(4, 4, 3, padding=1)
    found = patches_of(layer, torch.rand(4, 4, 20, 20))
    assert 50 <= found.shape[1] <= 200
    assert patches_of(nn.Linear(3, 2), torch.rand(5, 200, 3)).shape == (1, 100, 3)
    one = convolution_patches(
        torch.rand(2, 6, 50), (5,), stride=(2,), padding=[(1, 2)], dilation=(1,), groups=3
    )
    assert one.shape == (3, 50, 10)


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


def test_other_layers_and_strange_inputs_are_not_rounded() -> None:
    found, plain = Calibrated(), nn.Linear(4, 4)
    others = [
        Doubled(4, 4),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3, padding="same"),
    ]
    found.watch(others[0], torch.rand(3, 4))
    found.watch(others[1], torch.rand(1, 4, 5, 5))
    found.watch(others[2], torch.rand(1, 4, 5, 5))
    found.watch(plain, torch.tensor([[math.inf, 0.0, 1.0, 2.0]]))
    assert [found.rounded(layer) for layer in (*others, plain, nn.Linear(2, 2))] == [None] * 5


INPUTS = {
    "spread": lambda: torch.rand(2, 3, 6, 6),
    "zero": lambda: torch.zeros(2, 3, 6, 6),
    "constant": lambda: torch.ones(2, 3, 6, 6),
    "of rank one": lambda: torch.rand(2, 3, 1, 1).expand(2, 3, 6, 6),
}


@pytest.mark.parametrize("inputs", INPUTS)
def test_dead_channels_and_degenerate_inputs_keep_the_output(inputs: str) -> None:
    """Weights of 1e-10 beside a bias of 5, which overflowed where biases are integers (onnxruntime#21000), and inputs
    whose covariance cannot be inverted (llm-compressor#2952)."""
    layer, x = nn.Conv2d(3, 3, 3, groups=3), INPUTS[inputs]()
    assert layer.bias is not None
    with torch.no_grad():
        layer.weight[0] = 1e-10
        layer.weight[1] = 0
        layer.bias.copy_(torch.tensor([5.0, -4.5, 1.0]))
        assert (calibrated_on(layer, x)(x) - layer(x)).abs().max() < 0.02
