"""Integers in groups of the input, each group with a scale and an offset of its own for each output feature.

A weight is integer · scale + offset: what AWQ, GPTQ and GGUF keep. The kernel makes it bfloat16 as it reads it.

    (panels, groups, [64 float32 scales, 64 float32 offsets, group/V x 4 x 16 x 4 bytes]), V = 32 / bits values a word

Value j of lane i of a word is that of feature 8 · (j % 2) + i / 2 of its block and input 2 · (j / 2) + i % 2 of its V.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from torchwright.hardware.kernels.pack import BLOCK, PANEL, padded_depth

HALF, PAIR = BLOCK // 2, 2


def pack_grouped(
    integers_NK: torch.Tensor, scale_NG: torch.Tensor, offset_NG: torch.Tensor, group_size: int, bits: int
) -> torch.Tensor:
    """uint8 integers from 0 on, float32 scales and offsets, as the bytes that `linear_grouped` reads."""
    N, K = integers_NK.shape
    depth, rows = padded_depth(K, group_size), -(-N // PANEL) * PANEL
    padded = F.pad(integers_NK, (0, depth - K, 0, rows - N))
    values = 32 // bits
    # Panel, block, half, feature of the half; word, pair of inputs, input of the pair.
    parts = padded.view(rows // PANEL, PANEL // BLOCK, PAIR, HALF, depth // values, values // 2, PAIR)
    words = parts.permute(0, 4, 1, 3, 6, 5, 2)
    if bits == 4:
        words = words[..., 0] | words[..., 1] << 4
    data = words.reshape(rows // PANEL, depth // group_size, -1)
    heads = torch.stack([scale_NG, offset_NG], 2).float()
    heads = F.pad(heads, (0, 0, 0, depth // group_size - heads.shape[1], 0, rows - N))
    heads = heads.view(rows // PANEL, PANEL, depth // group_size, 2).permute(0, 2, 3, 1).flatten(2)
    return torch.cat([heads.contiguous().view(torch.uint8), data], 2).flatten()


def unpack_grouped(
    packed: torch.Tensor, features: int, depth: int, group_size: int, bits: int
) -> torch.Tensor:
    """The weight (N, depth) in float32 that `pack_grouped` packed, padding of the depth included."""
    panels, values = -(-features // PANEL), 32 // bits
    groups = packed.view(panels, depth // group_size, -1)
    scale, offset = (
        groups[..., : 8 * PANEL]
        .contiguous()
        .view(torch.float32)
        .view(panels, -1, 2, PANEL)
        .permute(2, 0, 3, 1)
        .reshape(2, panels * PANEL, -1)
    )
    data = groups[..., 8 * PANEL :].reshape(
        panels, depth // values, PANEL // BLOCK, HALF, PAIR, values // 2, -1
    )
    if bits == 4:
        data = torch.cat([data & 15, data >> 4], -1)
    integers = data.permute(0, 2, 6, 3, 1, 5, 4).reshape(panels * PANEL, depth)
    wide = integers * scale.repeat_interleave(group_size, 1) + offset.repeat_interleave(group_size, 1)
    return wide[:features]
