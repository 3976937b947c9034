"""Emulated block floats: against a search through all codes, against torchao, and as a technique."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique, UnknownName
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.apply import apply_steps, make_target
from torchwright.optimization.techniques.emulated_floats import EmulatedFloats, EmulatedLinear
from torchwright.optimization.techniques.shared.block_floats import BLOCKS, Format, round_blocks, round_e2m1
from torchwright.workloads.module import ModuleWorkload

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""By code: the three bits after the sign."""
FORMATS: tuple[Format, ...] = ("nvfp4", "mxfp8", "mxfp4")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def nearest_e2m1(value: float) -> float:
    code = min(range(8), key=lambda code: (abs(abs(value) - E2M1[code]), code % 2))
    return math.copysign(E2M1[code], value)


def test_four_bits_are_the_nearest_code_and_of_two_the_even_one() -> None:
    ties = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    values = torch.tensor([*E2M1, *ties, 7.0, 100.0, *torch.rand(200).mul(7).tolist()])
    values = torch.cat([values, -values])
    assert round_e2m1(values).tolist() == [nearest_e2m1(value) for value in values.tolist()]


def blocks_one_by_one(x: torch.Tensor, format: Format) -> torch.Tensor:
    """The formats again, in Python's arithmetic."""
    whole = x.abs().max().item() / (6 * 448) or 1.0
    found = []
    for block in x.reshape(-1, BLOCKS[format]).tolist():
        largest = max(map(abs, block))
        top = 448.0 if format == "mxfp8" else 6.0
        if format == "nvfp4":
            share = min(max(largest / 6 / whole, 2.0**-6), 448.0)
            scale = torch.tensor(share).to(torch.float8_e4m3fn).item() * whole
        else:
            scale = 2.0 ** max(math.ceil(math.log2(largest / top)), -126) if largest else 1.0
        for value in block:
            if format == "mxfp8":
                found.append(torch.tensor(value / scale).to(torch.float8_e4m3fn).item() * scale)
            else:
                found.append(nearest_e2m1(value / scale) * scale)
    return torch.tensor(found).reshape(x.shape)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4])
def test_blocks_equal_those_of_python(format: Format, size: float) -> None:
    x = torch.randn(6, 64) * torch.logspace(-2, 2, 6)[:, None] * size
    x[1, :32] = 0
    expected = blocks_one_by_one(x, format)
    assert (round_blocks(x, format) - expected).abs().max() <= 1e-6 * x.abs().max()


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_equal_torchaos(format: Format) -> None:
    """What torchao computes where it has no kernels, with the scales of its inference."""
    config: Any = pytest.importorskip("torchao.prototype.mx_formats.config")
    x = torch.randn(8, 128) * torch.logspace(-2, 2, 8)[:, None]
    if format == "nvfp4":
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

        tensor: Any = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
    else:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        element = torch.float8_e4m3fn if format == "mxfp8" else torch.float4_e2m1fn_x2
        tensor = MXTensor.to_mx(x, element, 32, scaling_mode=config.ScaleCalculationMode.RCEIL)
    expected = tensor.dequantize(torch.float32)
    assert (round_blocks(x, format) - expected).abs().max() <= 1e-6 * x.abs().max()


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_rounded_already_stays(format: Format) -> None:
    once = round_blocks(torch.randn(4, 64), format)
    assert (round_blocks(once, format) - once).abs().max() < 1e-6
    assert round_blocks(once.bfloat16(), format).dtype == torch.bfloat16


@pytest.mark.parametrize(("format", "lost"), [("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 128)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_block_with_nan_or_infinity_is_nan(format: Format, lost: int, value: float) -> None:
    x = torch.randn(2, 64)
    x[1, 40] = value
    found = round_blocks(x, format)
    assert found.isnan().sum() == lost
    assert found[1, 32:].isnan().all() or format == "nvfp4"


def target_of(model: nn.Module, *inputs: torch.Tensor) -> Any:
    return make_target(ModuleWorkload(model.eval(), inputs), get_device("cpu").identify())


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_computes_with_rounded_weights_and_inputs(format: Format) -> None:
    model = nn.Sequential(nn.Linear(64, 24), nn.GELU(), nn.Linear(24, 64), nn.Linear(64, 8, bias=False))
    x = torch.randn(5, 64)
    target = target_of(model, x)
    apply_steps(target, (Step(name="emulated_floats", options={"format": format}),))
    (coverage,) = target.coverage
    assert coverage.skipped == {"2": f"24 inputs are not a multiple of the block of {BLOCKS[format]}"}
    first, _, middle, last = target.model
    assert [type(each) for each in (first, middle, last)] == [EmulatedLinear, nn.Linear, EmulatedLinear]
    with torch.no_grad():
        expected = round_blocks(x, format) @ round_blocks(model[0].weight, format).T + model[0].bias
        assert (first(x) - expected).abs().max() < 1e-5
        exact, found = model(x), target.model(x)
    error = ((found - exact).norm() / exact.norm()).item()
    assert {"mxfp8": 0.005, "mxfp4": 0.05, "nvfp4": 0.05}[format] < error < {"mxfp8": 0.06}.get(format, 0.25)


def test_layers_can_be_left_alone_by_name() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(4, 64)
    target = target_of(model, x)
    apply_steps(target, (Step(name="emulated_floats", options={"skip": ["1"]}),))
    assert [type(each) for each in target.model] == [EmulatedLinear, nn.Linear]
    with pytest.raises(UnknownName, match="emulated_floats:skip"):
        apply_steps(target_of(model, x), (Step(name="emulated_floats", options={"skip": ["3"]}),))
    with pytest.raises(RefusedTechnique, match="left alone by option"):
        apply_steps(target_of(model, x), (Step(name="emulated_floats", options={"skip": ["0", "1"]}),))


def test_the_ranking_sees_what_the_technique_computes_and_only_users_ask_for_it() -> None:
    technique, layer, x = EmulatedFloats(format="nvfp4"), nn.Linear(64, 16), torch.randn(7, 64)
    error = technique.module_error(layer, x)
    stand_in = technique.stand_in(layer)
    assert error is not None
    assert stand_in is not None
    with torch.no_grad():
        assert error == pytest.approx(((stand_in(x) - layer(x)).norm() / layer(x).norm()).item())
    assert technique.stand_in(nn.Linear(20, 16)) is None
    assert technique.stand_in(nn.Conv2d(16, 16, 1)) is None
    assert technique.retreat(("0",)) == EmulatedFloats(format="nvfp4", skip=("0",))
    assert list(technique.variants(target_of(nn.Sequential(layer), x))) == []
