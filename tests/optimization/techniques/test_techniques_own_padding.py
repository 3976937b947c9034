"""Convolutions with a padding of their own: equal at every size once the padding is in numbers, or left alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from calibrated_layers import calibrated_on
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.compiled.packaging import rewritten
from torchwright.optimization.engines.compiled.program import compile_program, export, functional
from torchwright.optimization.engines.dispatch.call import spec_of
from torchwright.optimization.engines.sensitivity import rank_modules
from torchwright.optimization.techniques.shared.int8_graph import keep_not_finite, share_integers
from torchwright.optimization.techniques.shared.own_padding import PaddedConv2d, explicit
from torchwright.optimization.techniques.shared.rounding import patches_of
from torchwright.workloads.module import ModuleWorkload

SIZES = ((7, 9), (8, 10), (9, 8), (16, 13), (31, 30), (30, 33))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Fixed(nn.Conv2d):
    """Pads by a module, as EfficientNet-Lite's layers do."""

    def __init__(
        self, *args: Any, sides: tuple[int, int, int, int], value: float = 0.0, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.pad = nn.ConstantPad2d(sides, value)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(self.pad(input))


class Same(nn.Conv2d):
    """TensorFlow's "SAME", by the size of each input, as timm and EfficientNet-PyTorch have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sides: list[int] = []
        for axis in (1, 0):
            size, step = x.shape[2 + axis], self.stride[axis]
            reach = (
                (math.ceil(size / step) - 1) * step + (self.kernel_size[axis] - 1) * self.dilation[axis] + 1
            )
            zeros = max(reach - size, 0)
            sides += [zeros // 2, zeros - zeros // 2]
        x = F.pad(x, sides)
        return F.conv2d(x, self.weight, self.bias, self.stride, (0, 0), self.dilation, self.groups)


@torch.no_grad()
@pytest.mark.parametrize("stride", [1, 2, 3, 4, (1, 2)])
@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (2, 1), (3, 1), (3, 2), (5, 1), ((1, 4), 1)])
@pytest.mark.parametrize("groups", [1, 4])
def test_same_padding_is_equal_at_sizes_of_every_remainder(
    kernel: Any, dilation: int, stride: Any, groups: int
) -> None:
    layer = Same(4, 8, kernel, stride, dilation=dilation, groups=groups, bias=groups > 1)
    new = explicit(layer, [(16, 16)])
    assert new is not None
    for size in SIZES:
        x = torch.randn(2, 4, *size)
        torch.testing.assert_close(new(x), layer(x))


@torch.no_grad()
@pytest.mark.parametrize("sides", [(0, 1, 0, 1), (1, 2, 0, 0), (1, 1, 2, 2), (0, 0, 0, 0)])
@pytest.mark.parametrize("padding", [0, 1])
def test_fixed_padding_is_added_to_the_layers_own(sides: tuple[int, int, int, int], padding: int) -> None:
    layer = Fixed(4, 8, 3, 2, padding=padding, sides=sides)
    new = explicit(layer, [(16, 16)])
    assert new is not None
    assert isinstance(new, PaddedConv2d) == (sides[0] != sides[1])
    assert new.weight is layer.weight
    for size in SIZES:
        x = torch.randn(2, 4, *size)
        torch.testing.assert_close(new(x), layer(x))


class OddSizesOnly(nn.Conv2d):
    """Another padding for even heights than for odd ones."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(input, (1, 1, 1, 1 + 3 * (input.shape[2] % 2))))


class LargeSizesOnly(nn.Conv2d):
    """Another padding from 64 pixels on: only a call of the model shows it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(input, (2, 2, 2, 2) if input.shape[2] >= 64 else (1, 1, 1, 1)))


class Mirrored(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(input.flip(-1), (1, 1, 1, 1)))


class Cropped(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(input, (1, 1, 1, 1)))[..., 1:]


class Standardized(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(F.pad(input, (1, 1, 1, 1)), self.weight - self.weight.mean(), self.bias)


class Twice(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(F.pad(input, (1, 1, 1, 1))))


class Gated(nn.Conv2d):
    def forward(self, input: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(input * gate, (1, 1, 1, 1)))


OTHERS = {
    "odd sizes": lambda: OddSizesOnly(4, 4, 3),
    "large sizes": lambda: LargeSizesOnly(4, 4, 3),
    "mirrored": lambda: Mirrored(4, 4, 3),
    "cropped": lambda: Cropped(4, 4, 3),
    "another weight": lambda: Standardized(4, 4, 3),
    "two products": lambda: Twice(4, 4, 3),
    "two inputs": lambda: Gated(4, 4, 3),
    "ones": lambda: Fixed(4, 4, 3, sides=(1, 1, 1, 1), value=1.0),
    "edges": lambda: Fixed(4, 4, 3, padding=1, padding_mode="replicate", sides=(0, 0, 0, 0)),
    "cut off": lambda: Fixed(4, 4, 3, sides=(-1, 1, 0, 0)),
}
"""Name → a layer that no padding in numbers is equal to."""


@torch.no_grad()
@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_compute_something_else_are_left_alone(name: str) -> None:
    assert explicit(OTHERS[name](), [(64, 64)]) is None


@torch.no_grad()
def test_timms_convolution_is_equal_at_other_sizes() -> None:
    same: Any = pytest.importorskip("timm.layers").Conv2dSame
    for layer in (same(4, 4, 3, stride=2, groups=4), same(3, 8, 5, stride=2, bias=False)):
        new = explicit(layer, [(32, 32)])
        assert new is not None
        for size in SIZES:
            x = torch.randn(2, layer.in_channels, *size)
            torch.testing.assert_close(new(x), layer(x))


def padded(sides: tuple[int, int, int, int]) -> nn.Conv2d:
    found = explicit(Fixed(6, 6, 3, 2, groups=6, sides=sides))
    assert found is not None
    return found


@torch.no_grad()
def test_patches_of_a_padded_layer_are_those_of_its_output() -> None:
    layer, x = padded((0, 1, 0, 1)), torch.randn(3, 6, 10, 9)
    weight_GNK = layer.weight.reshape(6, 1, -1)
    expected = (layer(x) - layer(torch.zeros_like(x))).movedim(1, -1).reshape(-1, 6)
    found = (patches_of(layer, x) @ weight_GNK.mT)[..., 0].T
    assert (found - expected).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("value", [0.5, math.nan, math.inf])
def test_an_8_bit_layer_pads_with_zeros_and_keeps_nan(value: float) -> None:
    """Zero is an integer of its own where inputs have both signs; a padding by the integer 0 would be the minimum."""
    layer, x = padded((0, 1, 0, 1)), torch.randn(4, 6, 10, 9) - 2
    static = calibrated_on(layer, x)
    x[2, 1, -1, -1] = value
    got, exact = static(x), layer(x)
    assert torch.equal(got.isfinite(), exact.isfinite())
    assert (got[:2] - exact[:2]).norm() < 0.03 * exact[:2].norm()


class Padded(nn.Module):
    """A padded stem, a padded depthwise layer with a norm, and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = (
            Same(3, 16, 3, 2),
            Fixed(16, 16, 3, 2, groups=16, bias=False, sides=(0, 1, 0, 1)),
        )
        self.norm, self.point = nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1)
        assert self.norm.running_mean is not None
        self.norm.running_mean.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.point(F.relu6(self.norm(self.deep(F.relu6(self.stem(x))))))


def applied(x: torch.Tensor, *steps: Step) -> Any:
    target = make_target(ModuleWorkload(Padded().eval(), (x,)), get_device("cpu").identify())
    apply_steps(target, (*steps, Step(name="int8_static"), Step(name="compile")))
    return target


@torch.no_grad()
def test_all_layers_of_a_model_that_pads_itself_are_in_8_bits() -> None:
    x = torch.randn(4, 3, 32, 32)
    target = applied(x)
    coverage = target.coverage[0]
    assert (coverage.changed, coverage.skipped) == (3, {})
    original = target.workload.build()
    for other in (x, torch.randn(2, 3, 31, 30)):
        exact = original(other)
        assert (target.model(other) - exact).norm() < 0.05 * exact.norm()


def test_layers_that_pad_themselves_are_ranked() -> None:
    target = make_target(
        ModuleWorkload(Padded().eval(), (torch.randn(4, 3, 32, 32),)), get_device("cpu").identify()
    )
    assert {each.name for each in rank_modules(target, (Step(name="int8_static"),))} == {
        "stem",
        "deep",
        "point",
    }


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_of_padded_integers_keeps_nan_as_nan(dtype: str) -> None:
    x = torch.randn(4, 3, 32, 32)
    target = applied(x, *((Step(name="dtype"),) if dtype == "bfloat16" else ()))
    cases = target.workload.graphs(target.compute_dtype)
    program = functional(export(target.model, cases)[cases[0].name])
    share_integers(program.graph_module)
    module = program.module()
    expected = target.model(x)
    assert torch.equal(module(x), expected)
    keep_not_finite(module)
    assert torch.equal(module(x), expected)
    x[1, 0, 5, 5] = math.nan
    assert torch.equal(module(x).isnan(), target.model(x).isnan())
    assert module(x)[1].isnan().any()


@pytest.mark.slow
@torch.no_grad()
def test_compiled_layers_read_padded_integers(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    x = torch.randn(4, 3, 32, 32)
    target = applied(x)
    cases = target.workload.graphs(target.compute_dtype)
    program = rewritten(export(target.model, cases)[cases[0].name], target.settings)
    expected = program.module()(x)
    counters.clear()
    compile_program(program, tmp_path / "model.pt2", target.settings.inductor)
    assert counters["inductor"]["qconv_weight_prepack_matcher_count"] == 3
    got = Package(tmp_path / "model.pt2", spec_of("forward", program)).run([x])
    assert (got - expected).norm() < 0.02 * expected.norm()
