"""Norms, gates, and the rotary embedding with its writes into the cache: one program for a row or a head."""

# Kernels are compiled by Triton, not run by Python: a type checker knows neither tiles nor launches.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchwright.hardware.kernels.gpu import check
from torchwright.hardware.kernels.gpu.language import convert, round_even, step_inverse

GATED_BLOCK, ROPE_HEADS = 1024, 16
"""Features and heads of one program."""


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, total_out, features, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    """A row of rms_norm(x), or of rms_norm(x + residual) and the sum as it is stored."""
    row = tl.program_id(0).to(tl.int64) * features
    e = tl.arange(0, BLOCK)
    inside = e < features
    value = tl.load(x + row + e, mask=inside, other=0.0)
    if ADDS:
        other = tl.load(residual + row + e, mask=inside, other=0.0)
        value = convert(convert(value, tl.float32) + convert(other, tl.float32), value.dtype)
        tl.store(total_out + row + e, value, mask=inside)
    wide = convert(value, tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / features + eps)
    y = wide * factor * tl.load(weight + e, mask=inside, other=0.0)
    tl.store(out + row + e, convert(y, value.dtype), mask=inside)


@triton.jit
def gated_kernel(x, out, features, SILU: tl.constexpr, BLOCK: tl.constexpr):
    """activation(gate) · up of one row of (gate, up)."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < features
    gate = convert(tl.load(x + row * 2 * features + f, mask=inside, other=0.0), tl.float32)
    up = convert(tl.load(x + (row * 2 + 1) * features + f, mask=inside, other=0.0), tl.float32)
    # (1 + tanh(u)) / 2 is sigmoid(2u).
    inner = gate if SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    y = convert(gate * tl.sigmoid(inner) * up, out.dtype.element_ty)
    tl.store(out + row * features + f, y, mask=inside)


@triton.jit
def rope_kernel(
    qkv, cos, sin, positions, slots, k_pages, v_pages, k_scale, v_scale, q_norm, k_norm, q_out,
    angles, slot_count, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """ROWS heads of one token, queries before keys before values: normed, turned, and stored where they belong."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (d < D)
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * D
    x = convert(tl.load(source + d, mask=inside, other=0.0), tl.float32)
    # Each dimension with the one it turns with, which it reads for itself.
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    turns = inside & (head < HEADS + KV_HEADS) & (d < 2 * HALF)
    y = convert(tl.load(source + partner, mask=turns, other=0.0), tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    if Q_NORM:
        normed = head < HEADS
        x = tl.where(normed, x * factor * tl.load(q_norm + d, mask=d < D, other=0.0), x)
        y = tl.where(normed, y * factor * tl.load(q_norm + partner, mask=d < 2 * HALF, other=0.0), y)
    if K_NORM:
        normed = (head >= HEADS) & (head < HEADS + KV_HEADS)
        x = tl.where(normed, x * factor * tl.load(k_norm + d, mask=d < D, other=0.0), x)
        y = tl.where(normed, y * factor * tl.load(k_norm + partner, mask=d < 2 * HALF, other=0.0), y)
    position = tl.minimum(tl.maximum(tl.load(positions + token), 0), angles - 1)
    angle = position * HALF + tl.where(d < HALF, d, partner)
    c = tl.load(cos + angle, mask=d < 2 * HALF, other=1.0)
    s = tl.load(sin + angle, mask=d < 2 * HALF, other=0.0)
    x = tl.where(turns, x * c + tl.where(d < HALF, -y, y) * s, x)
    at = (token * HEADS + head) * D + d
    tl.store(q_out + at, convert(x, q_out.dtype.element_ty), mask=inside & (head < HEADS))

    slot = tl.load(slots + token)
    limit = tl.where((slot >= 0) & (slot < slot_count), HEADS + 2 * KV_HEADS, 0)
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS) & (head < limit)
    is_value = (head >= HEADS + KV_HEADS) & (head < limit)
    page_head = slot // 16 * KV_HEADS + (head - HEADS) % KV_HEADS
    place = slot % 16
    if SCALED:
        peak = tl.max(tl.abs(x), 1)[:, None]
        stored = tl.clamp(round_even(x * step_inverse(peak)), -127.0, 127.0).to(tl.int8)
        tl.store(k_scale + page_head * 16 + place, peak / 127.0, mask=is_key)
        tl.store(v_scale + page_head * 16 + place, peak / 127.0, mask=is_value)
    else:
        stored = convert(x, k_pages.dtype.element_ty)
    tl.store(k_pages + page_head * (16 * D) + d * 16 + place, stored, mask=is_key & (d < D))
    tl.store(v_pages + page_head * (16 * D) + place * D + d, stored, mask=is_value & (d < D))


def rms_norm(x_in: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.rms_norm`."""
    check.floats(x_in, "x")
    x = x_in.contiguous()
    out = torch.empty_like(x)
    _norm(x, x, weight, out, out, eps, adds=False)
    return out


def add_rms_norm(
    x_in: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`."""
    check.floats(x_in, "x")
    if residual.shape != x_in.shape or residual.dtype != x_in.dtype or residual.device != x_in.device:
        raise ValueError("residual and x differ in shape, type or device")
    x = x_in.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _norm(x, residual.contiguous(), weight, out, total, eps, adds=True)
    return out, total


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    *,
    adds: bool,
) -> None:
    features = x.shape[-1]
    check.vector(weight, features, "weight", x)
    if not x.numel():
        return
    block = triton.next_power_of_2(features)
    rms_norm_kernel[(x.numel() // features,)](
        x, residual, weight, out, total, features, eps,
        ADDS=adds, BLOCK=block, num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=False,
    )  # fmt: skip


def gated(x_in: torch.Tensor, kind: str) -> torch.Tensor:
    """See `reference.gated`."""
    check.floats(x_in, "x")
    if x_in.shape[-1] % 2:
        raise ValueError(f"x must hold gate and value side by side; its width is {x_in.shape[-1]}")
    if kind not in ("silu", "gelu_tanh"):
        raise ValueError(f"kind is {kind}; silu or gelu_tanh is wanted")
    x = x_in.contiguous()
    features = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], features))
    if out.numel():
        grid = (out.numel() // features, -(-features // GATED_BLOCK))
        gated_kernel[grid](x, out, features, SILU=kind == "silu", BLOCK=GATED_BLOCK, enable_fp_fusion=False)
    return out


def rope_store(
    qkv_in: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See `reference.rope_store`; pages are k (P, K, D, 16) and v (P, K, 16, D) for every type.

    A token whose slot is in no page is not stored; a position beyond the angles takes the last.
    """
    page_heads, D = check.pages(k_pages, v_pages, k_scale, v_scale, qkv_in)
    check.floats(qkv_in, "qkv")
    width = (heads + 2 * kv_heads) * D
    if heads < 1 or page_heads != kv_heads or qkv_in.dim() != 2 or qkv_in.shape[1] != width:
        raise ValueError(
            f"qkv of shape {list(qkv_in.shape)} is not {heads} + 2 x {kv_heads} heads of {D} for pages of {page_heads}"
        )
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > D:
        raise ValueError("cos and sin must be (positions, rotated / 2)")
    qkv, tokens = qkv_in.contiguous(), len(qkv_in)
    for tensor, count, name in ((cos, cos.numel(), "cos"), (sin, sin.numel(), "sin")):
        check.vector(tensor, count, name, qkv)
    for tensor, name in ((positions, "positions"), (slots, "slots")):
        check.vector(tensor, tokens, name, qkv, torch.int64)
    check.vector(q_norm, D, "q_norm", qkv)
    check.vector(k_norm, D, "k_norm", qkv)
    q = qkv.new_empty(tokens, heads, D)
    if not tokens:
        return q
    scaled = k_pages.dtype == torch.int8
    block, all_heads = triton.next_power_of_2(D), heads + 2 * kv_heads
    rows = min(triton.next_power_of_2(all_heads), ROPE_HEADS)
    rope_kernel[(tokens, -(-all_heads // rows))](
        qkv, cos, sin, positions, slots, k_pages, v_pages,
        k_scale if scaled else cos, v_scale if scaled else cos,
        cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, q,
        len(cos), len(k_pages) * 16, eps,
        HEADS=heads, KV_HEADS=kv_heads, D=D, HALF=cos.shape[1], ROWS=rows, BLOCK=block,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, SCALED=scaled,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return q
