"""Packed linear layers on Triton's kernels: against float64, the same bits in every batch, wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from triton_device import DEVICE, ops, poison, randn

from torchwright.core.scheme import MADE, scheme_of
from torchwright.hardware.kernels import pack
from torchwright.hardware.kernels.gpu import linear, operators
from torchwright.hardware.kernels.limits import LONGEST
from torchwright.hardware.kernels.linear import PackedLinear

SHAPES = [(37, 17), (130, 200)]
"""Output and input features, neither full panels nor full groups."""
TOLERANCE = 2e-6
"""Of the sum of the products' magnitudes."""
GROUPED = [
    ("bf16", 32),
    ("w8a8", 32),
    ("w4a8", 32),
    ("w4a8", 128),
    ("w4a16", 32),
    ("w4a16", 64),
]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that the interpreter can afford are cut into spans as large ones are."""
    monkeypatch.setattr(linear, "SPAN_STEPS", 1)


def make(scheme: str, N: int, K: int, group: int = 32, *, bias: bool = True, seed: int = 0) -> PackedLinear:
    weight = randn(N, K, seed=seed).cpu() / K**0.5
    offsets = randn(N, seed=seed + 1).cpu() if bias else None
    return PackedLinear(weight, offsets, scheme_of(scheme, group), device=DEVICE).to(DEVICE)


def check(layer: PackedLinear, x: torch.Tensor) -> None:
    """Against float64 on activations rounded as the scheme rounds them."""
    wide = x.float()
    if layer.scheme.name.endswith("16"):
        rounded = wide.bfloat16().double()
    else:
        peak = wide.abs().amax(-1, keepdim=True)
        step = torch.where(peak > 0, torch.full_like(peak, 127.0) / peak, 0)
        rounded = torch.round(wide * step).double() * (peak.double() / 127)
    weight = layer.wide_weight().double()
    bias = torch.zeros_like(weight[:, 0]) if layer.bias is None else layer.bias.double()
    wanted = nn.functional.linear(rounded, weight, bias)
    allowed = TOLERANCE * nn.functional.linear(rounded.abs(), weight.abs(), bias.abs())
    if x.dtype == torch.bfloat16:
        allowed += 2**-8 * wanted.abs()
    poison(wanted.to(x.dtype))
    y = layer(x)
    assert y.dtype == x.dtype
    assert y.shape == (*x.shape[:-1], layer.out_features)
    excess = (y.double() - wanted).abs() - allowed
    assert not excess.isnan().any()
    assert not excess.numel() or float(excess.max()) <= 0, f"{(excess / allowed).max() + 1} x the tolerance"


@pytest.mark.parametrize(("scheme", "group"), GROUPED)
def test_against_float64(scheme: str, group: int) -> None:
    for (N, K), shape, dtype in zip(SHAPES, [(2, 3), (70,)], [torch.bfloat16, torch.float32], strict=True):
        check(make(scheme, N, K, group, bias=N == 37, seed=N), randn(*shape, K, seed=K).to(dtype))
    assert make(scheme, 5, 7, group)(randn(0, 7)).shape == (0, 5)


@pytest.mark.parametrize("scheme", MADE)
def test_rows_do_not_depend_on_each_other(scheme: str) -> None:
    """To the bit: over row counts that take other tiles, and spans in one program or in one each."""
    layer = make(scheme, 64, 192)
    x = randn(66, 192, seed=2) * randn(66, 1, seed=3).exp()
    whole = layer(x)
    for rows in (1, 7, 32, 65):
        assert torch.equal(layer(x[-rows:]), whole[-rows:]), f"the last {rows} rows"
    assert torch.equal(torch.cat([layer(part) for part in x.split(40)]), whole)


def test_few_rows_take_spans_apart() -> None:
    """What the test above relies on: both ways are taken, and a float sum is cut as the layer says."""
    for rows, apart in ((1, True), (32, True), (65, False)):
        found = linear.plan(rows, 64, 192, 4, whole=False)
        assert (found.spans, found.apart, found.block_m) == (2, apart, 32)
    assert linear.plan(1, 64, 192, 8, whole=True).apart
    assert linear.plan(200, 64, 192, 8, whole=True).spans == 1


@pytest.mark.parametrize("scheme", MADE)
def test_the_same_weight_as_on_a_cpu(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers, multipliers and scales: whatever was calibrated for one device holds on the other."""
    weight = randn(70, 150, seed=5).cpu()
    here = PackedLinear(weight, None, scheme_of(scheme, 64), device=DEVICE)
    monkeypatch.setattr(operators, "takes", lambda device: False)
    cpu = PackedLinear(weight, None, scheme_of(scheme, 64), device=DEVICE)
    assert here.layout is not cpu.layout
    assert cpu.layout is pack
    assert torch.equal(here.wide_weight(), cpu.wide_weight())
    assert here.packed.shape == cpu.packed.shape


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_extremes(scheme: str) -> None:
    """Rows of huge and of tiny values, an outlier among small ones, and zeros that give the bias."""
    layer, x = make(scheme, 37, 100), randn(4, 100, seed=4)
    x[0] *= 1e30
    x[1] *= 1e-30
    x[2] *= 1e-3
    x[2, 77] = 1e4
    x[3] = 0
    check(layer, x)
    assert torch.equal(layer(x[3]), layer.bias)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_what_is_no_number_stays_in_its_row(scheme: str) -> None:
    layer, x = make(scheme, 37, 100), randn(3, 100)
    x[1, 5] = torch.nan
    x[2, 5] = torch.inf
    y = layer(x)
    assert torch.equal(y[0], layer(x[0]))
    assert y[1].isnan().all()
    assert not y[2].isfinite().any()


@pytest.mark.parametrize("scheme", MADE)
def test_operators_pass_the_checks_of_torch(scheme: str) -> None:
    """Schema, fake implementation, and tracing with dynamic shapes."""
    layer = make(scheme, 37, 64)
    rest: tuple[Any, ...] = (layer.packed,) if scheme == "bf16" else (layer.packed, layer.scale)
    rest = (*rest, layer.bias, 37, *([32] if scheme.startswith("w4") else []))
    torch.library.opcheck(getattr(ops, f"linear_{scheme}").default, (randn(2, 64), *rest))


def test_arguments_are_checked() -> None:
    layer, x = make("w4a8", 37, 64), randn(2, 64)

    def refused(error: type[Exception], match: str, **changed: Any) -> None:
        arguments = {"x": x, "weight": layer.packed, "scale": layer.scale, "bias": layer.bias, "features": 37}
        with pytest.raises(error, match=match):
            ops.linear_w4a8(**{**arguments, "group_size": 32, **changed})

    refused(TypeError, "float32 or bfloat16", x=x.double())
    refused(ValueError, "no features", x=x[:, :0])
    refused(ValueError, "weight must be", x=randn(2, 65))
    refused(ValueError, "weight must be", weight=layer.packed[:-1])
    refused(ValueError, "weight must be", weight=layer.packed.view(torch.int8))
    refused(ValueError, "scale must be", scale=layer.scale[:37])  # pyright: ignore[reportOptionalSubscript]
    refused(ValueError, "bias must be", bias=randn(38))
    refused(ValueError, "bias must be", bias=randn(74)[::2])
    refused(ValueError, "weight must be", features=65)
    refused(ValueError, "features is 0", features=0)
    refused(ValueError, "group_size is 16", group_size=16)
    wide = randn(1, LONGEST + 1)
    refused(ValueError, "sums of int32", x=wide, weight=make("w4a8", 1, LONGEST + 1).packed, features=1,
            scale=randn(64), bias=None)  # fmt: skip
