"""Quantized weights and their packed layouts: bytes in the order in which the kernels read them.

A panel is 64 output features, in four blocks of sixteen; input features are padded with zeros to the depth.

    bf16   (panels, depth/2, 4, 16, 2) bfloat16
    w8     (panels, depth/4, 4, 16, 4) bytes, value + 128, and one float32 scale a feature
    w4     (panels, groups, [64 int8 multipliers, group/8 x 4 x 16 x 4 bytes]): byte j of a lane holds the values j
           (low half) and j + 4 (high half) of eight inputs, each + 8; and one float32 scale a feature

A 4-bit weight is integer · multiplier · scale. The multiplier of its group is a whole number from 1 to 15 or its
negative: integer · multiplier then fits 8 bits, and a whole row of products is summed as integers (the two levels of
QServe, Lin et al., 2024).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from torchwright.core.errors import ModelError
from torchwright.hardware.kernels.cpu import build
from torchwright.hub.weight import BLOCK as AT_ONCE

PANEL, BLOCK, DEPTH = 64, 16, 64
BLOCK_ELEMENTS = 1 << 19
SHRINKS = (0.64, 1.03)
"""Range of fractions of the scale that covers a group's largest weight; the multiplier in it with the least weighted
error is taken."""
WIDEST = 15
"""Largest multiplier: 8 · 15 fits 8 bits."""


def finite(weight: torch.Tensor, name: str) -> torch.Tensor:
    """The weight, ready to be rounded; raises `ModelError` with its name where a number has no place on any grid."""
    strange = weight.numel() - int(weight.isfinite().sum())
    if strange:
        raise ModelError(
            f"the weight '{name}' cannot be quantized",
            found=f"{strange} of its {weight.numel()} numbers are NaN or infinite",
            next="take a checkpoint without them, or leave its weights as they are",
        )
    return weight


def quantize_w8(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 (N, K), float32 scale (N,)): symmetric, per-channel scales, nearest, range ±127."""
    integers = torch.empty(weight_NK.shape, dtype=torch.int8, device=weight_NK.device)
    scale_N = torch.empty(len(weight_NK), device=weight_NK.device)
    for rows in _row_blocks(weight_NK):
        wide = weight_NK[rows].float()
        scale = wide.abs().amax(1).clamp_min(1e-12) / 127
        integers[rows] = (wide / scale[:, None]).round_().clamp_(-127, 127)
        scale_N[rows] = scale
    return integers, scale_N


def quantize_w4(
    weight_NK: torch.Tensor, group_size: int, importance_K: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(int8 (N, K) in [-8, 7], int8 multipliers (N, groups), float32 scale (N,)): symmetric groups along the input.

    Each group takes the multiplier with the least Σ importance · error²; `importance_K` is the mean square of each
    input feature over calibration data, and None weighs all alike. A last group that is not full is padded with zeros.
    """
    (N, K), device = weight_NK.shape, weight_NK.device
    importance = torch.ones(K) if importance_K is None else importance_K.float()
    importance = _pad(importance[None], 1, group_size, 0.0)[0].to(device)
    native = build.load_fault() is None and weight_NK.device.type == "cpu"
    search: Any = torch.ops.torchwright.quantize_w4 if native else search_w4
    integers = torch.empty(N, K, dtype=torch.int8, device=device)
    multipliers = torch.empty(N, len(importance) // group_size, dtype=torch.int8, device=device)
    scale_N = torch.empty(N, device=device)
    for rows in _row_blocks(weight_NK):
        wide = _pad(weight_NK[rows].float(), 1, group_size, 0.0).contiguous()
        block, multipliers[rows], scale_N[rows] = search(wide, importance, group_size)
        integers[rows] = block[:, :K]
    return integers, multipliers, scale_N


def search_w4(
    wide_NK: torch.Tensor, importance_K: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the operator `quantize_w4` in plain PyTorch; K is a multiple of the group."""
    N, K = wide_NK.shape
    groups = wide_NK.view(N, K // group_size, group_size)
    scale_N = row_scale(wide_NK, group_size)
    best_NG = best_multipliers(groups, importance_K.view(-1, group_size), scale_N)
    steps = scale_N[:, None, None] * best_NG[..., None]
    integers = torch.round(groups / steps).clamp(-8, 7).to(torch.int8)
    return integers.view(N, K), best_NG.to(torch.int8), scale_N


def row_scale(wide_NK: torch.Tensor, group_size: int) -> torch.Tensor:
    """The scale (N,) with which the widest group of each row takes the largest multiplier."""
    return _full_scales(wide_NK.view(len(wide_NK), -1, group_size)).abs().amax(1) / WIDEST


def best_multipliers(
    groups_NGK: torch.Tensor, importance_GK: torch.Tensor, scale_N: torch.Tensor
) -> torch.Tensor:
    """The multiplier (N, G) of each group with the least Σ importance · error², a float that is a whole number."""
    full = _full_scales(groups_NGK)
    size, sign = (full / scale_N[:, None]).abs(), torch.where(full < 0, -1.0, 1.0)
    first = (SHRINKS[0] * size).floor().clamp(1, WIDEST)
    last = (SHRINKS[1] * size).ceil().clamp(1, WIDEST)
    best_error, best = torch.full_like(full, torch.inf), last
    for multiplier in range(WIDEST, 0, -1):
        step = (scale_N[:, None] * (sign * multiplier))[..., None]
        error = torch.round(groups_NGK / step).clamp(-8, 7) * step - groups_NGK
        error = (error.square() * importance_GK).sum(2)
        better = (error < best_error) & (multiplier >= first) & (multiplier <= last)
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, torch.full_like(best, multiplier), best)
    return sign * best


def _full_scales(groups_NGK: torch.Tensor) -> torch.Tensor:
    """The scale (N, G) that puts each group's largest weight on -8, the longer side of the range."""
    largest = groups_NGK.gather(2, groups_NGK.abs().argmax(2, keepdim=True)).squeeze(2)
    return torch.where(largest.abs() < 1e-12, torch.full_like(largest, 1e-12), largest) / -8


def pack_bf16(weight_NK: torch.Tensor) -> torch.Tensor:
    """A bfloat16 weight as the bytes (uint8, one dimension) that `linear_bf16` reads."""
    padded = _pad(_pad(weight_NK.bfloat16(), 0, PANEL, 0.0), 1, DEPTH, 0.0)
    return _interleave(padded.contiguous().view(torch.int32)).view(torch.uint8)


def pack_w8(integers_NK: torch.Tensor) -> torch.Tensor:
    """int8 weights as the bytes that `linear_w8a8` reads."""
    padded = _pad(_pad(integers_NK, 0, PANEL, 0), 1, DEPTH, 0)
    # Adding 128 is flipping the sign bit.
    return _interleave((padded.view(torch.uint8) ^ 0x80).view(torch.int32)).view(torch.uint8)


def pack_w4(integers_NK: torch.Tensor, multipliers_NG: torch.Tensor, group_size: int) -> torch.Tensor:
    """4-bit weights and their multipliers as the bytes that `linear_w4a8` and `linear_w4a16` read."""
    step = max(group_size, DEPTH)
    padded = _pad(_pad(integers_NK, 0, PANEL, 0), 1, step, 0)
    N, K = padded.shape
    missing = (0, K // group_size - multipliers_NG.shape[1], 0, N - multipliers_NG.shape[0])
    nibbles = (padded + 8).view(torch.uint8).view(N, K // 8, 2, 4)
    data = _interleave((nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)).view(N, K // 2).view(torch.int32))
    data = data.view(torch.uint8).view(N // PANEL, K // group_size, -1)
    heads = F.pad(multipliers_NG, missing).view(N // PANEL, PANEL, -1).transpose(1, 2)
    return torch.cat([heads.contiguous().view(torch.uint8), data], 2).flatten()


def _interleave(words_NW: torch.Tensor) -> torch.Tensor:
    """Rows of four-byte words in the order of panels: (panels, words, 4, 16) of them, flat."""
    N, W = words_NW.shape
    return words_NW.view(N // PANEL, PANEL // BLOCK, BLOCK, W).permute(0, 3, 1, 2).flatten()


def _row_blocks(weight_NK: torch.Tensor) -> list[slice]:
    """Rows in pieces whose float32 copy stays in the cache, and that no large layer is copied whole."""
    step = max(1, BLOCK_ELEMENTS // weight_NK.shape[1])
    return [slice(start, start + step) for start in range(0, len(weight_NK), step)]


def some_panels(features: int, depth: int) -> list[slice]:
    """Return whole panels of a checkpoint's numbers in pieces whose wide copies take little memory."""
    step = max(1, AT_ONCE // (PANEL * depth)) * PANEL
    return [slice(begin, begin + step) for begin in range(0, features, step)]


def unpack_w4(
    packed: torch.Tensor, features: int, depth: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The (integers (N, depth), multipliers (N, groups)) that `pack_w4` packed, padding of the depth included."""
    panels = -(-features // PANEL)
    rows = packed.view(panels, depth // group_size, -1)
    multipliers = rows[..., :PANEL].transpose(1, 2).reshape(panels * PANEL, -1).view(torch.int8)
    data = rows[..., PANEL:].reshape(panels, depth // 8, PANEL // BLOCK, BLOCK, 4).permute(0, 2, 3, 1, 4)
    halves = torch.stack([data & 15, data >> 4], dim=-2).reshape(panels * PANEL, depth)
    return halves[:features].to(torch.int8) - 8, multipliers[:features]


def unpack_w8(packed: torch.Tensor, features: int, depth: int) -> torch.Tensor:
    """The integers (N, depth) that `pack_w8` packed."""
    panels = -(-features // PANEL)
    data = packed.view(panels, depth // 4, PANEL // BLOCK, BLOCK, 4).permute(0, 2, 3, 1, 4)
    return (data.reshape(panels * PANEL, depth)[:features].to(torch.int16) - 128).to(torch.int8)


def unpack_bf16(packed: torch.Tensor, features: int, depth: int) -> torch.Tensor:
    """The weight (N, depth) that `pack_bf16` packed."""
    panels = -(-features // PANEL)
    data = (
        packed.view(torch.bfloat16).view(panels, depth // 2, PANEL // BLOCK, BLOCK, 2).permute(0, 2, 3, 1, 4)
    )
    return data.reshape(panels * PANEL, depth)[:features]


def padded_depth(features: int, group_size: int = 0) -> int:
    """Input features as the kernels count them."""
    step = max(group_size, DEPTH)
    return -(-features // step) * step


def _pad(x: torch.Tensor, dim: int, step: int, value: float) -> torch.Tensor:
    missing = -x.shape[dim] % step
    return F.pad(x, (0, 0, 0, missing) if dim == 0 else (0, missing), value=value) if missing else x
