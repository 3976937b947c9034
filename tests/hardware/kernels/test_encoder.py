"""What encoders call: a layer with what follows it, and attention without a cache, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from torchwright.core.scheme import W8A8
from torchwright.hardware.kernels import pack
from torchwright.hardware.kernels.linear import PackedLinear

LAYER_ERROR = {torch.float32: 1e-3, torch.bfloat16: 5e-3}
"""Relative (Frobenius): an input that falls between two steps may be rounded the other way; bfloat16 rounds twice."""
ATTENTION_ERROR = 6e-3
"""Relative (Frobenius): weights and outputs are rounded to bfloat16."""
ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
SHAPES = [(2, 3, 64, 64, 32), (1, 4, 197, 197, 64), (2, 2, 5, 7, 16), (1, 2, 33, 100, 80), (3, 1, 1, 1, 16)]
"""Batch, heads, queries, keys, head size."""


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_follows_a_layer(isa: str, native: Any, dtype: torch.dtype, name: str, residual: bool) -> None:
    torch.manual_seed(3)
    for rows, K, N in ((1, 33, 17), (37, 96, 200)):
        layer = PackedLinear(torch.randn(N, K) / K**0.5, torch.randn(N), W8A8)
        x = (4 * torch.randn(rows, K)).to(dtype)
        more = torch.randn(rows, N).to(dtype) if residual else None
        got = native.linear_w8a8_fused(x, *tensors(layer), N, name, more)
        wanted = ACTIVATIONS[name](exact_layer(layer, x)) + (0 if more is None else more.double())
        assert got.dtype == dtype
        error = (got.double() - wanted).norm() / wanted.norm()
        assert float(error) <= LAYER_ERROR[dtype]


def tensors(layer: PackedLinear) -> tuple[Any, ...]:
    sums = layer.wide_weight().double().sum(1).float()
    return layer.packed, layer.scale, F.pad(sums, (0, -len(sums) % pack.PANEL)), layer.bias


def exact_layer(layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """In float64, but for the rounding of every row to 255 levels about the middle of its range."""
    wide = x.float()
    low, high = wide.amin(-1, keepdim=True) / 2, wide.amax(-1, keepdim=True) / 2
    center, half = low + high, high - low
    rounded = torch.round((wide - center) * (127 / half)).double() * half.double() / 127 + center.double()
    rounded = torch.where(half > 0, rounded, wide.double())
    bias = 0 if layer.bias is None else layer.bias.double()
    return rounded @ layer.wide_weight().double().T + bias


def test_rows_without_a_range_and_rows_that_are_not_finite(isa: str, native: Any) -> None:
    layer = PackedLinear(torch.randn(70, 40), torch.randn(70), W8A8)
    x = torch.randn(4, 40)
    x[0], x[1, 3], x[2, 39] = 2.5, torch.nan, torch.inf
    y = native.linear_w8a8_fused(x, *tensors(layer), 70, "none", None)
    torch.testing.assert_close(y[0].double(), exact_layer(layer, x)[0], rtol=1e-5, atol=1e-4)
    assert y[1:3].isnan().all()
    assert y[3].isfinite().all()


def test_a_residual_of_another_shape_is_refused(native: Any) -> None:
    layer = PackedLinear(torch.randn(64, 64), None, W8A8)
    call, x = native.linear_w8a8_fused, torch.randn(2, 64)
    with pytest.raises(ValueError, match="residual is"):
        call(x, *tensors(layer), 64, "none", torch.randn(3, 64))
    with pytest.raises(ValueError, match="activation is mish"):
        call(x, *tensors(layer), 64, "mish", None)


def exact(q: Any, k: Any, v: Any, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if hidden else scores + mask.double()
    return scores.softmax(-1).nan_to_num(0) @ v.double()


@pytest.mark.parametrize("kind", [None, "bool", "keys", "float", "infinite"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(isa: str, native: Any, shape: tuple[int, ...], kind: str | None) -> None:
    torch.manual_seed(4)
    B, H, T, S, D = shape
    q = torch.randn(B, T, H, D).bfloat16().transpose(1, 2)
    k = torch.randn(B, H, S, 2 * D).bfloat16()[..., D:]
    v = torch.randn(B, H, D, S).bfloat16().transpose(2, 3)
    mask = None
    if kind == "bool":
        mask = torch.rand(B, 1, T, S) > 0.3
        mask[:, :, 0] = False  # a query that sees nothing is answered with zeros
    elif kind == "keys":
        mask = torch.rand(B, 1, 1, S) > 0.5
    elif kind is not None:
        mask = torch.randn(H, T, S)
        if kind == "infinite":
            mask = torch.where(torch.rand(T, S) > 0.5, mask, -torch.inf)
    got = native.attention(q, k, v, mask, D**-0.5)
    wanted = exact(q, k, v, mask, D**-0.5)
    assert got.shape == q.shape
    assert got.transpose(1, 2).is_contiguous()
    error = (got.double() - wanted).norm() / wanted.norm().clamp_min(1e-12)
    assert float(error) <= ATTENTION_ERROR
    if kind == "bool":
        assert not got[:, :, 0].any()


def test_attention_hands_a_nan_on_and_refuses_what_it_cannot_read(native: Any) -> None:
    q = torch.randn(1, 1, 8, 16).bfloat16()
    broken = q.clone()
    broken[0, 0, 3, 2] = torch.nan
    assert native.attention(q, broken, q, None, 1.0).isnan().any(-1).all()
    for k, v, kind, text in (
        (q.float(), q, TypeError, "k is Float"),
        (q, q[:, :, :4], ValueError, "do not fit"),
        (q[..., :8], q[..., :8], ValueError, "do not fit"),
    ):
        with pytest.raises(kind, match=text):
            native.attention(q, k, v, None, 1.0)
    with pytest.raises(ValueError, match="multiples of 16"):
        native.attention(q[..., :8], q[..., :8], q[..., :8], None, 1.0)
