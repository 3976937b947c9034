"""Integers in groups of the input, each group with a scale and an offset of its own for each output feature.

A weight is integer · scale + offset: what AWQ, GPTQ and GGUF keep. The kernel makes it bfloat16 as it reads it.

    (panels, groups, [64 float32 scales, 64 float32 offsets, group/V x 4 x 16 x 4 bytes]), V = 32 / bits values a word

Value j of lane i of a word is that of feature 8 · (j % 2) + i / 2 of its block and input 2 · (j / 2) + i % 2 of its V.

Where the processor has AMX, 4-bit integers in groups of 32 and more are laid out as tiles:

    (panels, groups, [heads, 4 blocks x group/32 steps x 4 lines x 32 x 2 bytes])

Nibble j of word i (two bytes) of a line is that of feature 4 · line + j of its block and input i of its step. Heads
are 64 float32 scales and 64 float32 offsets. Short heads are 64 float16 scales and 64 bytes z of offsets -z · scale.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import Any

import torch
from torch.nn import functional as F

from torchwright.core.scheme import Scheme
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.pack import BLOCK, PANEL, padded_depth, some_panels

HALF, PAIR = BLOCK // 2, 2
STEP, LINES = 32, 4
"""Inputs and lines of a tile."""
SHORT_BYTES, LARGEST_ZERO = 3, 255
"""Bytes of a float16 scale and a zero; the largest zero that one byte holds."""

Grouped = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Integers (N, K) in uint8, scales and offsets (N, G) in float32."""


class Layout(IntEnum):
    """Layouts of integers in groups, with the numbers that operators and artifacts give them."""

    LANES = 0
    TILES = 1
    SHORT_TILES = 2


def fits_tiles(scheme: Scheme) -> bool:
    """Check whether weights of a scheme may be laid out as tiles."""
    return scheme.kept and not scheme.floats and scheme.weight_bits == 4 and (scheme.group or 0) >= STEP


def wants_tiles(scheme: Scheme) -> bool:
    """Check whether the kernels in use read weights of a scheme as tiles."""
    native: Any = torch.ops.torchwright
    return fits_tiles(scheme) and build.load_fault() is None and native.reads_tiles()


def layout_here(scheme: Scheme, scale_NG: torch.Tensor, offset_NG: torch.Tensor) -> Layout:
    """Return the layout that the kernels in use read fastest."""
    if not wants_tiles(scheme):
        return Layout.LANES
    zero_NG = _zeros(scale_NG, offset_NG)
    exact = (scale_NG.half().float() == scale_NG) & (-zero_NG * scale_NG == offset_NG)
    fits = exact & (zero_NG >= 0) & (zero_NG <= LARGEST_ZERO)
    return Layout.SHORT_TILES if bool(fits.all()) else Layout.TILES


def bytes_of(scheme: Scheme, weights: int, layout: Layout) -> int:
    """Return the bytes of this many weights in whole groups."""
    if layout == Layout.SHORT_TILES:
        scheme = replace(scheme, group_bytes=SHORT_BYTES)
    return scheme.bytes_of(weights)


def pack_grouped(grouped: Grouped, scheme: Scheme, layout: Layout) -> torch.Tensor:
    """Return integers, scales and offsets as the bytes that `linear_grouped` reads."""
    (N, K), group = grouped[0].shape, scheme.group
    assert group
    depth = padded_depth(K, group)
    parts = []
    for rows in some_panels(N, depth):
        integers, scale, offset = (part[rows] for part in grouped)
        missing = -len(integers) % PANEL
        padded = F.pad(integers, (0, depth - K, 0, missing))
        words = _as_lanes(padded, scheme.weight_bits) if layout == Layout.LANES else _as_tiles(padded, group)
        data = words.reshape(len(padded) // PANEL, depth // group, -1)
        scale, offset = (
            F.pad(part.float(), (0, depth // group - part.shape[1], 0, missing)) for part in (scale, offset)
        )
        parts.append(torch.cat([_heads(scale, offset, layout), data], 2).flatten())
    return torch.cat(parts)


def unpack_grouped(
    packed: torch.Tensor, features: int, depth: int, scheme: Scheme, layout: Layout
) -> Grouped:
    """Return what `pack_grouped` packed, padding of the depth included."""
    heads, data = _heads_and_data(packed, depth, scheme, layout)
    if layout == Layout.LANES:
        integers = _from_lanes(data, depth, scheme.weight_bits)
    else:
        integers = _from_tiles(data)
    scale, offset = _from_heads(heads, layout)
    return integers.reshape(-1, depth)[:features], scale[:features], offset[:features]


def repack_here(
    packed: torch.Tensor, depth: int, scheme: Scheme, layout: Layout
) -> tuple[torch.Tensor, Layout]:
    """Return the same weights in the layout of `layout_here`; no number is rounded."""
    heads, _ = _heads_and_data(packed, depth, scheme, layout)
    wanted = layout_here(scheme, *_from_heads(heads, layout))
    if wanted == layout:
        return packed, layout
    panel = bytes_of(scheme, PANEL * depth, layout)
    panels = packed.view(-1, panel)
    parts = []
    for rows in some_panels(len(panels) * PANEL, depth):
        some = panels[rows.start // PANEL : rows.stop // PANEL].flatten()
        numbers = unpack_grouped(some, len(some) // panel * PANEL, depth, scheme, layout)
        parts.append(pack_grouped(numbers, scheme, wanted))
    return torch.cat(parts), wanted


def _zeros(scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The z of offset = -z · scale, or the number nearest to it."""
    return torch.where(scale == 0, 0, (-offset / scale).round())


def _heads(scale_NG: torch.Tensor, offset_NG: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Bytes of all groups' heads: (panels, groups, bytes)."""
    by_panel = (-1, PANEL, scale_NG.shape[1])
    if layout == Layout.SHORT_TILES:
        parts = (scale_NG.half(), _zeros(scale_NG, offset_NG).to(torch.uint8))
    else:
        parts = (scale_NG, offset_NG)
    return torch.cat(
        [part.view(by_panel).transpose(1, 2).contiguous().view(torch.uint8) for part in parts], 2
    )


def _from_heads(heads: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets (N, G) of whole panels."""
    at = 2 * PANEL if layout == Layout.SHORT_TILES else 4 * PANEL
    first, second = heads[..., :at].contiguous(), heads[..., at:].contiguous()
    if layout == Layout.SHORT_TILES:
        scale = first.view(torch.float16).float()
        offset = 0 - second.float() * scale
    else:
        scale, offset = first.view(torch.float32), second.view(torch.float32)
    groups = heads.shape[1]
    return scale.transpose(1, 2).reshape(-1, groups), offset.transpose(1, 2).reshape(-1, groups)


def _heads_and_data(
    packed: torch.Tensor, depth: int, scheme: Scheme, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of all groups (panels, groups, bytes)."""
    assert scheme.group
    groups = packed.view(-1, depth // scheme.group, bytes_of(scheme, PANEL * scheme.group, layout))
    head = groups.shape[2] - PANEL * scheme.group * scheme.weight_bits // 8
    return groups[..., :head], groups[..., head:]


def _as_lanes(integers_NK: torch.Tensor, bits: int) -> torch.Tensor:
    """Words of all lanes, in order."""
    (N, K), values = integers_NK.shape, 32 // bits
    # Panel, block, half, feature of the half; word, pair of inputs, input of the pair.
    parts = integers_NK.view(N // PANEL, PANEL // BLOCK, PAIR, HALF, K // values, values // 2, PAIR)
    words = parts.permute(0, 4, 1, 3, 6, 5, 2)
    return words[..., 0] | words[..., 1] << 4 if bits == 4 else words


def _from_lanes(data: torch.Tensor, depth: int, bits: int) -> torch.Tensor:
    """Undo `_as_lanes`, of the bytes of all groups."""
    values = 32 // bits
    data = data.reshape(len(data), depth // values, PANEL // BLOCK, HALF, PAIR, values // 2, -1)
    if bits == 4:
        data = torch.cat([data & 15, data >> 4], -1)
    return data.permute(0, 2, 6, 3, 1, 5, 4)


def _as_tiles(integers_NK: torch.Tensor, group: int) -> torch.Tensor:
    """Bytes of all tiles, in order."""
    N, K = integers_NK.shape
    # Panel, block, line, half of a word, nibble; group, step, input.
    parts = integers_NK.view(N // PANEL, PANEL // BLOCK, LINES, 2, 2, K // group, group // STEP, STEP)
    words = parts.permute(0, 5, 1, 6, 2, 7, 3, 4)
    return words[..., 0] | words[..., 1] << 4


def _from_tiles(data: torch.Tensor) -> torch.Tensor:
    """Undo `_as_tiles`, of the bytes of all groups."""
    data = data.reshape(*data.shape[:2], PANEL // BLOCK, -1, LINES, STEP, 2)
    return torch.stack([data & 15, data >> 4], -1).permute(0, 2, 4, 6, 7, 1, 3, 5)
