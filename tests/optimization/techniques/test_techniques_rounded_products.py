"""Layers with 8-bit operands beside layers that compute with integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from calibrated_layers import calibrated_on
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.techniques.openvino import RunOpenVino
from torchwright.optimization.techniques.shared.rounded_products import Rounded
from torchwright.workloads.module import ModuleWorkload


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(48, 40), (6, 48)),
        (nn.Conv2d(8, 24, 3, 2, 1), (2, 8, 9, 9)),
        (nn.Linear(5, 3, bias=False), (2, 5)),
    ],
)
def test_a_layer_gives_what_a_calibrated_8_bit_layer_gives(layer: nn.Module, shape: Any) -> None:
    x = torch.randn(shape)
    with torch.no_grad():
        assert (Rounded(layer)(x) - calibrated_on(layer, x)(x)).abs().max() < 1e-5


class Padded(nn.Conv2d):
    """Pads its input and doubles its weight in front of the convolution, as layers of model packages do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = 2 * self.weight
        return F.conv2d(
            F.pad(input, (0, 1, 0, 1), value=3.0), weight=weight, bias=self.bias, stride=self.stride
        )


def test_a_subclass_rounds_what_it_multiplies() -> None:
    layer, x = Padded(4, 6, 3, stride=2), torch.rand(2, 4, 8, 8)
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    assert layer.bias is not None
    with torch.no_grad():
        padded = F.pad(x, (0, 1, 0, 1), value=3.0)
        same = nn.Conv2d(4, 6, 3, stride=2)
        same.load_state_dict({"weight": 2 * layer.weight, "bias": layer.bias})
        expected = calibrated_on(same, padded)(padded)
        got = Rounded(layer)(x)
        plain = layer(x)
    assert (got - expected).abs().max() < 1e-5
    assert 1e-4 < (got - plain).norm() / plain.norm() < 3e-2
    assert len(calls) == 1  # the plain call alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_by_name_and_other_types_are_taken(dtype: torch.dtype) -> None:
    class Named(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return F.linear(input=input, weight=self.weight, bias=self.bias)

    named, x = Named(16, 8).to(dtype), torch.randn(4, 16, dtype=dtype)
    plain = nn.Linear(16, 8).to(dtype)
    plain.load_state_dict(named.state_dict())
    with torch.no_grad():
        got = Rounded(named)(x)
        assert torch.equal(got, Rounded(plain)(x))
    assert got.dtype == dtype


@torch.no_grad()
def test_a_conversion_to_8_bits_is_emulated_layer_by_layer() -> None:
    x, model = torch.randn(6, 48), nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 8)).eval()
    made = {}
    for technique in (
        RunOpenVino(precision="int8"),
        RunOpenVino(precision="int8", skip=("2",)),
        RunOpenVino(),
    ):
        target = make_target(ModuleWorkload(model, (x,)), get_device("cpu").identify())
        technique.emulate(target)
        made[str(technique)] = target.model(x)
        assert target.model.get_submodule("0").weight.dtype == torch.float32  # its owner may read it
    first = Rounded(model[0])(x).relu()
    whole, part, plain = made.values()
    assert torch.equal(whole, Rounded(model[2])(first))
    assert torch.equal(part, model[2](first))
    assert torch.equal(plain, model(x))
