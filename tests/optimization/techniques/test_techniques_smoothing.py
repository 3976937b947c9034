"""Smoothed 8-bit layers beside float64 arithmetic: outlier features, models that it would harm, and shared inputs."""

from __future__ import annotations

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
from torchwright.optimization.engines.compiled.program import export, functional
from torchwright.optimization.techniques.shared.int8 import STEPS, Int8Layer, largest_weight
from torchwright.optimization.techniques.shared.int8_graph import QUANTIZE, share_integers
from torchwright.optimization.techniques.shared.rounded_products import Rounded
from torchwright.optimization.techniques.shared.rounding import Moments
from torchwright.optimization.techniques.shared.smoothing import (
    STRENGTHS,
    WORTH,
    Features,
    Smooth,
    Smoothing,
    best_scales,
    rounded_rows,
    scales_of,
    smooth_of,
)
from torchwright.workloads.module import ModuleWorkload

OUTLIERS = (3, 17, 40)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def outlying(rows: int = 200, factor: float = 40.0) -> torch.Tensor:
    """Rows of 128 features, three of which are much larger in all rows, as after the norms of transformers."""
    x = torch.randn(rows, 128)
    x[:, OUTLIERS] *= factor
    return x


def quiet_columns() -> nn.Linear:
    """A layer whose weights of the large features are small, so that they do not decide its output alone."""
    layer = nn.Linear(128, 48)
    with torch.no_grad():
        layer.weight[:, OUTLIERS] *= 0.1
    return layer


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def steps_of(x: torch.Tensor) -> torch.Tensor:
    """Round float64 values to 8 bits."""
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    step = (high - low) / STEPS
    zero = round(-low / step)
    return (torch.round(x / step + zero).clamp(0, STEPS) - zero) * step


def reference(layer: nn.Linear, x: torch.Tensor, scales_K: torch.Tensor) -> torch.Tensor:
    """A linear layer in float64 whose divided input and multiplied weight are rounded to 8 bits."""
    weight = layer.weight.double() * scales_K.double()
    step_N = weight.abs().amax(1, keepdim=True) / largest_weight()
    assert layer.bias is not None
    rounded = steps_of(x.double() / scales_K.double())
    return rounded @ (torch.round(weight / step_N) * step_N).T + layer.bias.double()


@torch.no_grad()
def test_a_static_layer_computes_the_rounded_product_of_divided_inputs_and_multiplied_weights() -> None:
    layer, x = quiet_columns(), outlying()
    smoothed = calibrated_on(layer, x)
    assert isinstance(smoothed.smooth, Smooth)
    exact = layer.double()(x.double())
    scales_K = smoothed.smooth.scales_K.double()
    weight = smoothed.integers.double() * smoothed.weight_scale.double()[:, None]
    assert relative(weight, layer.weight * scales_K) < 0.03
    expected = steps_of(x.double() / scales_K) @ weight.T
    expected -= (expected - exact).mean(0)  # the bias takes back the mean
    assert relative(smoothed(x), expected) < 2e-3
    assert relative(smoothed(x), exact) < 0.6 * relative(reference(layer, x, torch.ones(128)), exact)


def test_few_rows_say_too_little_about_single_features() -> None:
    assert smooth_of(nn.Linear(128, 48), outlying(16)) is None


def test_plain_inputs_are_left_alone() -> None:
    assert smooth_of(nn.Linear(128, 48), torch.rand(200, 128) - 0.5) is None


@torch.no_grad()
def test_a_model_that_smoothing_harms_is_left_alone() -> None:
    """The large features meet the largest weights: what is taken from the one spoils the other's steps."""
    layer, x = nn.Linear(128, 48), outlying(factor=4.0)
    layer.weight[:, OUTLIERS] *= 10
    features = Features(128)
    features.add(x)
    exact = layer.double()(x.double())
    plain = relative(reference(layer, x, torch.ones(128)), exact)
    found = [scales_of(layer.weight.float(), features.all, strength) for strength in STRENGTHS]
    errors = [relative(reference(layer, x, scales_K), exact) for scales_K in found]
    assert min(errors) > WORTH * plain
    assert max(errors) > plain
    assert best_scales([layer.weight.float()], features) is None


@torch.no_grad()
def test_features_that_go_beyond_their_ranges_are_left_alone() -> None:
    """Pooled features, few rows and wide tails: the rows of the ranges themselves show a gain, other rows a loss."""
    layer, x, fresh = nn.Linear(128, 48), wide_tails(80), wide_tails(2000)
    features = Features(128)
    features.add(x)
    ones, scales_K = torch.ones(128), scales_of(layer.weight, features.all, 0.8)

    def error(rows: torch.Tensor, scales_K: torch.Tensor) -> float:
        product = rounded_rows(rows, features.all, scales_K) @ (layer.weight * scales_K).T
        return relative(product, rows @ layer.weight.T)

    assert error(x, scales_K) < error(x, ones)
    assert error(fresh, scales_K) > error(fresh, ones)
    assert smooth_of(layer, x) is None


def wide_tails(rows: int) -> torch.Tensor:
    """Rows of 128 features, each with a size of its own and now and then a value far above it."""
    sizes = torch.rand(128, generator=torch.Generator().manual_seed(1)) * 3
    return sizes * torch.randn(rows, 128).abs() ** 3


class Attends(nn.Module):
    """Three layers read one value, behind a norm with large features; one reads another value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.q, self.k, self.v, self.out = (nn.Linear(128, 128) for _ in range(4))
        with torch.no_grad():
            self.norm.weight[list(OUTLIERS)] *= 40

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        return x + self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])


def applied(model: nn.Module, x: torch.Tensor, *steps: Step) -> Any:
    target = make_target(ModuleWorkload(model.eval(), (x,)), get_device("cpu").identify())
    apply_steps(target, (*steps, Step(name="compile")))
    return target


@pytest.mark.plain("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_read_one_value_multiply_it_once(dtype: str) -> None:
    x = torch.randn(4, 16, 128)
    half = (Step(name="dtype"),) if dtype == "bfloat16" else ()
    target = applied(Attends(), x, *half, Step(name="int8_static"))
    model = target.model
    layers = {key: model.get_submodule(key) for key, _ in model.named_modules() if key.endswith((".q", ".k"))}
    layers = layers or {key: model.get_submodule(key) for key in ("q", "k")}
    first, second = (layer.smooth for layer in layers.values())
    assert first is second is not None
    cases = target.workload.cases(target.compute_dtype)
    program = functional(export(model, cases)[cases[0].name])
    before = program.module()(x)
    share_integers(program.graph_module)
    products = program.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    readers = [node for node in program.graph.nodes if node.target is QUANTIZE]
    out: Any = next(layer for key, layer in model.named_modules() if key.split(".")[-1] == "out")
    assert len(products) == 1 + (out.smooth is not None)
    assert sum(products[0] in node.all_input_nodes for node in readers) == 1
    assert relative(program.module()(x), before) < 2e-2


@torch.no_grad()
def test_the_technique_loses_less_with_outliers() -> None:
    x = torch.randn(8, 16, 128)
    model = Attends().eval()
    exact = model(x)
    smoothed, plain = (
        applied(model, x, Step(name="int8_static", options={"smooth": smooth})).model(x)
        for smooth in (True, False)
    )
    assert relative(smoothed, exact) < 0.7 * relative(plain, exact)


def test_a_new_tensor_at_an_old_address_is_another_value() -> None:
    smoothing = Smoothing()
    layers = [nn.Linear(128, 8) for _ in range(4)]
    for layer in layers:
        x = outlying(20)
        smoothing.watch(layer, x)
        del x  # whose memory the next one may get
    found = [smoothing.found(layer) for layer in layers]
    assert len({id(each) for each in found if each is not None}) == sum(each is not None for each in found)


def test_other_layers_and_strange_inputs_are_passed_over() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    for layer, x in (
        (Doubled(128, 8), outlying()),
        (nn.Conv2d(4, 4, 3), torch.randn(1, 4, 8, 8)),
        (nn.Linear(128, 8), outlying(1)),
        (nn.Linear(128, 8), outlying(0)),
        (nn.Linear(128, 8), outlying().index_fill(0, torch.tensor([5]), math.inf)),
        (nn.Linear(128, 8), outlying().index_fill(0, torch.tensor([5]), math.nan)),
    ):
        assert smooth_of(layer, x) is None


@torch.no_grad()
def test_dead_features_and_weights_give_finite_scales_and_room() -> None:
    """A feature that is small in calibration and large in a call is clipped no more than a typical one."""
    layer, x = quiet_columns(), outlying()
    x[:, 5] = 0
    layer.weight[:, 6] = 0
    smooth = smooth_of(layer, x)
    assert smooth is not None
    assert smooth.factor.isfinite().all()
    assert smooth.factor.max() <= 1
    smoothed, loud = calibrated_on(layer, x), outlying()
    loud[:, 5] = 1.0
    assert relative(smoothed(loud), layer(loud)) < 0.03


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_reads_a_smoothed_layers_weight_finds_its_values(dtype: torch.dtype) -> None:
    layer, x = quiet_columns().to(dtype), outlying().to(dtype)
    smoothed = calibrated_on(layer, x)
    assert smoothed.smooth is not None
    assert smoothed.weight.dtype == dtype
    assert relative(smoothed.weight, layer.weight) < 0.05


def test_moments_of_divided_patches_are_divided() -> None:
    x, scales_K = torch.randn(1, 300, 6) * 5 + 2, torch.rand(6) + 1
    whole, divided = Moments(convolves=False), Moments(convolves=False)
    whole.add(x)
    divided.add(x / scales_K)
    found = whole.divided(scales_K)
    assert torch.allclose(found.mean_GK, divided.mean_GK, atol=1e-5)
    assert found.covariance_GKK is not None
    assert divided.covariance_GKK is not None
    assert torch.allclose(found.covariance_GKK, divided.covariance_GKK, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_stand_in_is_smoothed_as_the_layer_is() -> None:
    layer, x = quiet_columns(), outlying()
    assert (Rounded(layer)(x) - calibrated_on(layer, x)(x)).abs().max() < 1e-4
    plain = Rounded(layer, smooth=False)(x)
    assert relative(Rounded(layer)(x), layer(x)) < 0.7 * relative(plain, layer(x))


def test_a_layer_with_nan_in_a_row_keeps_the_other_rows() -> None:
    layer, x = quiet_columns(), outlying()
    smoothed: Int8Layer = calibrated_on(layer, x)
    expected = smoothed(x)
    x[2, 1] = math.nan
    got = smoothed(x)
    assert got[2].isnan().all()
    assert torch.equal(got[3:], expected[3:])
