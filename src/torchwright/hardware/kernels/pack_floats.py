"""Small floats in groups of the input, as MXFP4 and FP8 checkpoints keep them; the kernel makes them bfloat16.

    mxfp4   (panels, groups, [64 exponents, group/8 x 4 x 16 x 4 bytes])           4-bit floats (e2m1) · 2^(e - 127)
    fp8     (panels, groups, [64 float32 scales, group/4 x 4 x 16 x 4 bytes])      8-bit floats (e4m3) · scale

A word of four bytes has eight (or four) inputs of its feature, from the lowest bits on: the even ones, then the odd.
Their bits are where the kernel wants them (`csrc/codes.h`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from torchwright.core.scheme import Scheme
from torchwright.hardware.kernels.pack import BLOCK, PANEL, padded_depth, some_panels
from torchwright.hub.weight import SmallFloats

PAIR = 2
OF_HALF = 256.0
"""The kernel reads a number of e4m3 as the float16 of the same bits, which is as many times smaller."""
LEAST, MOST = 2, 252
"""Exponents with which all 4-bit floats are normal numbers of bfloat16, as the kernel makes them."""
NAN = 127
"""The bits of the NaN of e4m3, without the sign."""


def packable(floats: SmallFloats) -> bool:
    """Check whether the kernel makes of these floats what they stand for."""
    scales = floats.scales_NG
    if floats.bits == 4:
        return bool(((scales >= LEAST) & (scales <= MOST)).all())
    numbers = not bool(((floats.codes_NK & NAN) == NAN).any())
    return numbers and bool((scales.float() * OF_HALF).isfinite().all())


def pack_floats(floats: SmallFloats, scheme: Scheme) -> torch.Tensor:
    """Return the bytes that `linear_grouped` reads; scales are those of the scheme's groups."""
    parts = []
    for rows in some_panels(*floats.codes_NK.shape):
        some = replace(floats, codes_NK=floats.codes_NK[rows], scales_NG=floats.scales_NG[rows])
        parts.append(_pack(some, scheme))
    return torch.cat(parts)


def _pack(floats: SmallFloats, scheme: Scheme) -> torch.Tensor:
    """Return the bytes of some panels."""
    (N, K), group = floats.codes_NK.shape, scheme.group
    assert group
    depth, rows, values = padded_depth(K, group), -(-N // PANEL) * PANEL, 32 // floats.bits
    padded = F.pad(floats.codes_NK, (0, depth - K, 0, rows - N))
    # Panel, block, feature; word, pair of inputs, input of the pair.
    parts = padded.view(rows // PANEL, PANEL // BLOCK, BLOCK, depth // values, values // PAIR, PAIR)
    words = parts.permute(0, 3, 1, 2, 5, 4)
    if floats.bits == 4:
        words = words[..., ::2] | words[..., 1::2] << 4
    else:
        words = _halves(words[..., 0].int(), words[..., 1].int())
    data = words.reshape(rows // PANEL, depth // group, -1)
    scales = floats.scales_NG if floats.bits == 4 else floats.scales_NG.float() * OF_HALF
    heads = F.pad(scales, (0, depth // group - scales.shape[1], 0, rows - N), value=1)
    heads = heads.view(rows // PANEL, PANEL, depth // group).transpose(1, 2).contiguous()
    return torch.cat([heads.view(torch.uint8), data], 2).flatten()


def unpack_floats(packed: torch.Tensor, features: int, depth: int, scheme: Scheme) -> SmallFloats:
    """Return what `pack_floats` packed, padding of the depth included."""
    group, bits = scheme.group, scheme.weight_bits
    assert group
    panels, values, head = -(-features // PANEL), 32 // bits, PANEL * scheme.group_bytes
    groups = packed.view(panels, depth // group, -1)
    heads = groups[..., :head].contiguous()
    scales = heads if bits == 4 else heads.view(torch.float32) / OF_HALF
    data = groups[..., head:].reshape(panels, depth // values, PANEL // BLOCK, BLOCK, PAIR, -1)
    if bits == 4:
        data = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    else:
        data = torch.stack(_codes(data.contiguous().view(torch.int16)[..., 0].int() & 0xFFFF), -1)
    codes = data.permute(0, 2, 3, 1, 5, 4).reshape(panels * PANEL, depth)
    scales_NG = scales.transpose(1, 2).reshape(panels * PANEL, -1)
    return SmallFloats(codes_NK=codes[:features], scales_NG=scales_NG[:features], bits=bits)


def _halves(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two bytes for each pair of 8-bit floats, with their bits where the kernel wants them (`csrc/codes.h`)."""
    rest = second >> 7 << 15 | (second & 7) << 12 | (second >> 3 & 15) << 7
    halves = first & 127 | first >> 7 << 11 | rest
    return halves.to(torch.int16).unsqueeze(-1).view(torch.uint8)


def _codes(halves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of 8-bit floats in two bytes, as `_halves` puts them there."""
    first = halves & 127 | (halves >> 11 & 1) << 7
    second = halves >> 15 << 7 | (halves >> 7 & 15) << 3 | halves >> 12 & 7
    return first.to(torch.uint8), second.to(torch.uint8)
