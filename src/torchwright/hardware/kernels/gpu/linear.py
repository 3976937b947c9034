"""Linear layers over packed weights: y = x Wᵀ + b.

One kernel for four schemes. A tile is BLOCK_N output features by BLOCK_M rows, the weight on the left, so that what is
unpacked in registers stays there. Sums of integers are exact, and their tiles fit the batch size. A float sum's
order must not depend on the batch: its tile is the same for every batch size, and the input features are
cut into spans that depend on the layer alone. Few rows leave most of a GPU idle, and then each span gets a program of
its own; else one program takes all. Either way the spans are added in their order.
"""

# Kernels are compiled by Triton, not run by Python: a type checker knows neither tiles nor launches.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torchwright.hardware.kernels.gpu import check
from torchwright.hardware.kernels.gpu.language import convert, dot, round_even, step_inverse
from torchwright.hardware.kernels.gpu.pack import STEP, split_w4
from torchwright.hardware.kernels.limits import LONGEST
from torchwright.hardware.kernels.pack import PANEL, padded_depth

PROGRAMS = 256
"""Programs that keep a large GPU busy: fewer tiles are cut into spans."""
MOST_SPANS, SPAN_STEPS = 16, 8
"""Spans of a layer at most, and steps of 64 input features in a span at least."""
FLOAT_ROWS = {16: 64, 4: 32}
"""Bits of a weight → rows of a tile of a float sum."""
QUANTIZE_BLOCK = 4096


@triton.jit
def quantize_kernel(x, integers, row_scale, width, depth, BLOCK: tl.constexpr):
    """A row of x (rows, width) as integers (rows, depth), zeros after the width, and its scale."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    peak = 0.0
    unreal = 0.0
    for start in range(0, width, BLOCK):
        k = start + offset
        value = tl.load(x + row * width + k, mask=k < width, other=0.0)
        value = convert(value, tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(value), 0))
        unreal += tl.sum(
            value - value, 0
        )  # 0, or NaN where something is infinite or NaN, which a maximum may hide
    inverse = step_inverse(peak)
    for start in range(0, depth, BLOCK):
        k = start + offset
        value = tl.load(x + row * width + k, mask=k < width, other=0.0)
        tl.store(
            integers + row * depth + k,
            round_even(convert(value, tl.float32) * inverse).to(tl.int8),
            mask=k < depth,
        )
    tl.store(row_scale + row, peak / 127.0 + unreal)


@triton.jit
def _halves(weight, multipliers, step, n, features, GROUP: tl.constexpr):
    """Both halves of a step of a 4-bit weight, (BLOCK_N, 32) int8 each: integer · multiplier."""
    j = tl.arange(0, 32)
    packed = tl.load(weight + (step * features + n[:, None]) * 32 + j[None, :])
    low = (packed & 15).to(tl.int8) - 8
    high = (packed >> 4).to(tl.int8) - 8
    times_low = tl.load(multipliers + (step * 64 // GROUP) * features + n)
    times_high = tl.load(multipliers + ((step * 64 + 32) // GROUP) * features + n)
    return low * times_low[:, None], high * times_high[:, None]


@triton.jit
def _inputs(x, m, k, rows, width, WHOLE: tl.constexpr, EVEN: tl.constexpr):
    """A tile (len(k), BLOCK_M) of x (rows, width): int8 as they are, floats rounded to bfloat16."""
    inside = m[None, :] < rows
    if not EVEN:
        inside = inside & (k[:, None] < width)
    tile = tl.load(x + m[None, :] * width + k[:, None], mask=inside, other=0)
    return tile if WHOLE else convert(tile, tl.bfloat16)


@triton.jit
def _span(
    x, weight, multipliers, m, n, rows, width, features, depth, first, last,
    BITS: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum (BLOCK_N, BLOCK_M) of the products of steps `first` to `last` of BLOCK_K input features."""
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if WHOLE else tl.float32)
    for step in range(first, last):
        if BITS == 4:
            low, high = _halves(weight, multipliers, step, n, features, GROUP)
            if not WHOLE:  # at most 8 · 15, which bfloat16 holds exactly
                low = convert(low, tl.bfloat16)
                high = convert(high, tl.bfloat16)
            k = step * 64 + tl.arange(0, 32)
            total = dot(low, _inputs(x, m, k, rows, width, WHOLE, EVEN), total)
            total = dot(high, _inputs(x, m, k + 32, rows, width, WHOLE, EVEN), total)
        else:
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            tile = tl.load(weight + n[:, None] * depth + k[None, :])
            total = dot(tile, _inputs(x, m, k, rows, width, WHOLE, EVEN), total)
    return total


@triton.jit
def _finish(
    total, row_scale, scale, bias, out, m, n, rows, out_features,
    BITS: tl.constexpr, WHOLE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Scales and bias on a sum (BLOCK_N, BLOCK_M), and into out (rows, out_features)."""
    y = total.to(tl.float32)
    if WHOLE:
        y = y * tl.load(row_scale + m, mask=m < rows, other=0.0)[None, :]
    if BITS != 16:
        y = y * tl.load(scale + n)[:, None]
    if BIASED:
        y = y + tl.load(bias + n, mask=n < out_features, other=0.0)[:, None]
    inside = (m[:, None] < rows) & (n[None, :] < out_features)
    y = convert(tl.trans(y), out.dtype.element_ty)
    tl.store(out + m[:, None] * out_features + n[None, :], y, mask=inside)


@triton.jit
def linear_kernel(
    x, weight, multipliers, row_scale, scale, bias, out, parts,
    rows, width, features, depth, out_features, steps, span_steps,
    BITS: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr,
    SPANS: tl.constexpr, APART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of y, or where spans are APART a tile of one span's sum into parts (spans, features, rows)."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * span_steps
    total = _span(
        x, weight, multipliers, m, n, rows, width, features, depth, begin, tl.minimum(begin + span_steps, steps),
        BITS, WHOLE, GROUP, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if APART:
        at = (tl.program_id(2) * features + n[:, None]) * rows + m[None, :]
        tl.store(parts + at, total, mask=m[None, :] < rows)
    else:
        for span in range(1, SPANS):
            begin = span * span_steps
            total += _span(
                x, weight, multipliers, m, n, rows, width, features, depth, begin,
                tl.minimum(begin + span_steps, steps),
                BITS, WHOLE, GROUP, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        _finish(total, row_scale, scale, bias, out, m, n, rows, out_features, BITS, WHOLE, BIASED)


@triton.jit
def join_kernel(
    parts, row_scale, scale, bias, out, rows, features, out_features,
    BITS: tl.constexpr, WHOLE: tl.constexpr, BIASED: tl.constexpr, SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The spans' sums added in their order, and finished."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = n[:, None] * rows + m[None, :]
    total = tl.load(parts + at, mask=m[None, :] < rows, other=0)
    for span in range(1, SPANS):
        total += tl.load(parts + span * features * rows + at, mask=m[None, :] < rows, other=0)
    _finish(total, row_scale, scale, bias, out, m, n, rows, out_features, BITS, WHOLE, BIASED)


@dataclass(frozen=True)
class TilePlan:
    """Tiles of one call; for a float sum all but `apart` follow from the layer alone."""

    block_m: int
    block_n: int
    block_k: int
    spans: int
    apart: bool
    warps: int
    stages: int


def plan(rows: int, features: int, depth: int, bits: int, *, whole: bool) -> TilePlan:
    """The tiles for `rows` rows of a layer of `features` (whole panels) by `depth`."""
    block_n = 2 * PANEL if features % (2 * PANEL) == 0 else PANEL
    block_k = 2 * STEP if bits == 8 and depth % (2 * STEP) == 0 else STEP
    block_m = min(max(16, triton.next_power_of_2(rows)), 128) if whole else FLOAT_ROWS[bits]
    spans, tiles = 1, features // block_n
    while spans < MOST_SPANS and spans * tiles < PROGRAMS and depth // STEP >= 2 * spans * SPAN_STEPS:
        spans *= 2
    apart = spans > 1 and rows <= block_m
    if whole and not apart:
        spans = 1  # any order gives the same sum
    warps = 8 if block_m * block_n > 64 * 128 else 4
    return TilePlan(block_m, block_n, block_k, spans, apart, warps, stages=4)


def linear_bf16(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, features: int
) -> torch.Tensor:
    """x, rounded to bfloat16, through a bfloat16 weight."""
    return _linear(x, weight, None, bias, features, bits=16, whole=False)


def linear_w8a8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, features: int
) -> torch.Tensor:
    """x, each row quantized to 8 bits, through an 8-bit weight."""
    return _linear(x, weight, scale, bias, features, bits=8, whole=True)


def linear_w4a8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    features: int,
    group_size: int,
) -> torch.Tensor:
    """x, each row quantized to 8 bits, through a 4-bit weight."""
    check.group(group_size)
    return _linear(x, weight, scale, bias, features, bits=4, whole=True, group=group_size)


def linear_w4a16(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    features: int,
    group_size: int,
) -> torch.Tensor:
    """x, rounded to bfloat16, through a 4-bit weight."""
    check.group(group_size)
    return _linear(x, weight, scale, bias, features, bits=4, whole=False, group=group_size)


def _linear(
    x_in: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    *,
    bits: int,
    whole: bool,
    group: int = 0,
) -> torch.Tensor:
    """Rows of x through a packed weight; `whole` multiplies integers."""
    check.linear(x_in, weight, scale, bias, out_features, bits, group)
    width = x_in.shape[-1]
    if whole and width > LONGEST:
        raise ValueError(f"x has {width} features; sums of int32 hold at most {LONGEST}")
    depth = padded_depth(width, group)
    features = -(-out_features // PANEL) * PANEL
    x = x_in.reshape(-1, width).contiguous()
    rows = len(x)
    out = x.new_empty(rows, out_features)
    if not rows:
        return out.view(*x_in.shape[:-1], out_features)
    row_scale = x.new_empty(rows if whole else 0, dtype=torch.float32)
    if whole:
        integers = x.new_empty(rows, depth, dtype=torch.int8)
        block = min(triton.next_power_of_2(depth), QUANTIZE_BLOCK)
        quantize_kernel[(rows,)](x, integers, row_scale, width, depth, BLOCK=block, enable_fp_fusion=False)
        x, width = integers, depth
    if bits == 4:
        multipliers, weight = split_w4(weight, out_features, depth, group)
    else:
        weight = multipliers = weight.view(torch.int8 if bits == 8 else torch.bfloat16)
    how = plan(rows, features, depth, bits, whole=whole)
    parts = x.new_empty(
        how.spans * features * rows if how.apart else 0, dtype=torch.int32 if whole else torch.float32
    )
    steps = depth // how.block_k
    grid = (-(-rows // how.block_m), features // how.block_n, how.spans if how.apart else 1)
    shared = {"BITS": bits, "WHOLE": whole, "BIASED": bias is not None, "SPANS": how.spans}
    blocks = {"BLOCK_M": how.block_m, "BLOCK_N": how.block_n}
    scale = row_scale if scale is None else scale
    bias = scale if bias is None else bias
    linear_kernel[grid](
        x, weight, multipliers, row_scale, scale, bias, out, parts,
        rows, width, features, depth, out_features, steps, -(-steps // how.spans),
        **shared, **blocks,
        GROUP=group, EVEN=width == depth, APART=how.apart, BLOCK_K=how.block_k,
        num_warps=how.warps, num_stages=how.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if how.apart:
        join_kernel[grid[:2]](
            parts, row_scale, scale, bias, out, rows, features, out_features,
            **shared, **blocks, enable_fp_fusion=False,
        )  # fmt: skip
    return out.view(*x_in.shape[:-1], out_features)
