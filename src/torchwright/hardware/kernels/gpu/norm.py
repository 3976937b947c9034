"""LayerNorm and RMSNorm with gradients: a row is one tile, which is read once in each pass."""

# Kernels are compiled by Triton, not run by Python: a type checker knows neither tiles nor launches.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchwright.hardware.kernels.gpu import check
from torchwright.hardware.kernels.gpu.language import convert

BLOCK_ROWS = 64
"""Rows of a program of the backward pass, which sums their gradients of weight and bias in order."""
WIDEST = 65536
"""Features of a tile: more do not fit into the registers of a program."""


@triton.jit
def norm_kernel(
    x, weight, bias, out, mean_out, inverse_out, features, eps,
    CENTERED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of (x - mean) · inverse · weight + bias, and its mean and inverse."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < features
    value = tl.load(x + row * features + e, mask=inside, other=0.0)
    wide = convert(value, tl.float32)
    if CENTERED:
        mean = tl.sum(wide, 0) / features
        wide = tl.where(inside, wide - mean, 0.0)
        tl.store(mean_out + row, mean)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / features + eps)
    tl.store(inverse_out + row, inverse)
    y = wide * inverse
    if WEIGHT:
        y = y * tl.load(weight + e, mask=inside, other=0.0)
    if BIAS:
        y = y + tl.load(bias + e, mask=inside, other=0.0)
    tl.store(out + row * features + e, convert(y, value.dtype), mask=inside)


@triton.jit
def norm_backward_kernel(
    grad, x, mean, inverse, weight, d_x, d_weight, d_bias, rows, features,
    CENTERED: tl.constexpr, WEIGHT: tl.constexpr, D_X: tl.constexpr, D_WEIGHT: tl.constexpr, D_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of ROWS rows, and their sums of those of weight and bias."""
    part = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < features
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    for row in range(part * ROWS, tl.minimum(rows, (part + 1) * ROWS)):
        g_stored = tl.load(grad + row * features + e, mask=inside, other=0.0)
        g = convert(g_stored, tl.float32)
        wide = convert(tl.load(x + row * features + e, mask=inside, other=0.0), tl.float32)
        factor = tl.load(inverse + row)
        if CENTERED:
            wide = wide - tl.load(mean + row)
        y = tl.where(inside, wide * factor, 0.0)
        if D_X:
            along = g
            if WEIGHT:
                along = g * tl.load(weight + e, mask=inside, other=0.0)
            away = along
            if CENTERED:
                away = along - tl.sum(along, 0) / features
            away = (away - y * (tl.sum(along * y, 0) / features)) * factor
            tl.store(d_x + row * features + e, convert(away, g_stored.dtype), mask=inside)
        if D_WEIGHT:
            weight_sum += g * y
        if D_BIAS:
            bias_sum += g
    if D_WEIGHT:
        tl.store(d_weight + part * features + e, weight_sum, mask=inside)
    if D_BIAS:
        tl.store(d_bias + part * features + e, bias_sum, mask=inside)


def norm(
    x_in: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, centered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.norm`."""
    features = _width(x_in, weight)
    check.vector(bias, features, "bias", x_in)
    if bias is not None and weight is None:
        raise ValueError("a norm with a bias has a weight too")
    x = x_in.contiguous()
    rows = x.numel() // features
    out = torch.empty_like(x)
    mean, inverse = (x.new_empty(count, dtype=torch.float32) for count in (rows if centered else 0, rows))
    if rows:
        norm_kernel[(rows,)](
            x, weight, bias, out, mean, inverse, features, eps,
            CENTERED=centered, WEIGHT=weight is not None, BIAS=bias is not None,
            enable_fp_fusion=False, **_tile(features),
        )  # fmt: skip
    return out, mean, inverse


def norm_backward(
    grad_in: torch.Tensor,
    x_in: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor | None,
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.norm`: gradients of x, weight and bias, those that are wanted; the others have no elements."""
    features = _width(x_in, weight)
    if grad_in.shape != x_in.shape or grad_in.dtype != x_in.dtype or grad_in.device != x_in.device:
        raise ValueError("grad and x differ in shape, type or device")
    grad, x = grad_in.contiguous(), x_in.contiguous()
    rows = x.numel() // features
    check.vector(inverse, rows, "inverse", x)
    if mean.numel():
        check.vector(mean, rows, "mean", x)
    parts = -(-rows // BLOCK_ROWS)
    d_x = torch.empty_like(x) if wanted[0] else x.new_empty(0)
    d_weight, d_bias = (
        x.new_empty((parts if asked else 0, features), dtype=torch.float32) for asked in wanted[1:]
    )
    if rows:
        norm_backward_kernel[(parts,)](
            grad, x, mean, inverse, weight, d_x, d_weight, d_bias, rows, features,
            CENTERED=mean.numel() > 0, WEIGHT=weight is not None,
            D_X=wanted[0], D_WEIGHT=wanted[1], D_BIAS=wanted[2], ROWS=BLOCK_ROWS,
            enable_fp_fusion=False, **_tile(features),
        )  # fmt: skip
    return d_x, _summed(d_weight, wanted[1]), _summed(d_bias, wanted[2])


def _summed(parts: torch.Tensor, asked: bool) -> torch.Tensor:
    return parts.sum(0) if asked else parts.new_empty(0)


def _width(x: torch.Tensor, weight: torch.Tensor | None) -> int:
    check.floats(x, "x")
    features = x.shape[-1]
    if features > WIDEST:
        raise ValueError(f"x has {features} features; at most {WIDEST} are one tile")
    check.vector(weight, features, "weight", x)
    return features


def _tile(features: int) -> dict[str, int]:
    block = triton.next_power_of_2(features)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
