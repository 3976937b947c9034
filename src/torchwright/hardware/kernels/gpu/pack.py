"""Packed layouts for GPUs: rows of the weight, in the bytes and numbers of elements of the layouts for CPUs.

    bf16   (N, depth) bfloat16
    w8     (N, depth) int8, and one float32 scale a feature
    w4     (groups, N) int8 multipliers, then (depth / 64, N, 32) bytes: byte j of a step's row holds its value j (low
           half) and its value j + 32 (high half), each + 8; and one float32 scale a feature

N and the depth are padded with zeros as `hardware/kernels/pack.py` pads them, and it makes the integers. A program's
tile of a 4-bit weight is one run of bytes, and each half of it lies within one group.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from torchwright.hardware.kernels.pack import PANEL, padded_depth

STEP = 64
HALF = STEP // 2


def pack_bf16(weight_NK: torch.Tensor) -> torch.Tensor:
    """A bfloat16 weight as bytes (uint8, one dimension)."""
    return _padded(weight_NK.bfloat16(), padded_depth(weight_NK.shape[1])).view(torch.uint8).flatten()


def pack_w8(integers_NK: torch.Tensor) -> torch.Tensor:
    """int8 weights as bytes."""
    return _padded(integers_NK, padded_depth(integers_NK.shape[1])).view(torch.uint8).flatten()


def pack_w4(integers_NK: torch.Tensor, multipliers_NG: torch.Tensor, group_size: int) -> torch.Tensor:
    """4-bit weights and their multipliers as bytes."""
    padded = _padded(integers_NK, padded_depth(integers_NK.shape[1], group_size))
    N, depth = padded.shape
    steps = (padded + 8).view(torch.uint8).view(N, depth // STEP, 2, HALF).transpose(0, 1)
    data = steps[:, :, 0] | (steps[:, :, 1] << 4)
    multipliers = _padded(multipliers_NG, depth // group_size).T.contiguous().view(torch.uint8)
    return torch.cat([multipliers.flatten(), data.flatten()])


def unpack_bf16(packed: torch.Tensor, features: int, depth: int) -> torch.Tensor:
    """The weight (N, depth) that `pack_bf16` packed."""
    return packed.view(torch.bfloat16).view(-1, depth)[:features]


def unpack_w8(packed: torch.Tensor, features: int, depth: int) -> torch.Tensor:
    """The integers (N, depth) that `pack_w8` packed."""
    return packed.view(torch.int8).view(-1, depth)[:features]


def unpack_w4(
    packed: torch.Tensor, features: int, depth: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The (integers (N, depth), multipliers (N, groups)) that `pack_w4` packed, padding of the depth included."""
    multipliers, data = split_w4(packed, features, depth, group_size)
    halves = torch.stack([data & 15, data >> 4], dim=2)
    integers = halves.transpose(0, 1).reshape(-1, depth).to(torch.int8) - 8
    return integers[:features], multipliers.T[:features]


def split_w4(
    packed: torch.Tensor, features: int, depth: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(multipliers (groups, padded N) int8, bytes (steps, padded N, 32)) of a packed 4-bit weight, not copied."""
    rows, groups = -(-features // PANEL) * PANEL, depth // group_size
    multipliers, data = packed.split([groups * rows, depth * rows // 2])
    return multipliers.view(torch.int8).view(groups, rows), data.view(depth // STEP, rows, HALF)


def _padded(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Whole panels of rows of so many columns, contiguous."""
    return F.pad(x, (0, columns - x.shape[1], 0, -len(x) % PANEL)).contiguous()
