"""Dequantize the blocks of GGUF's types, as ggml describes them; rows of bytes in, numbers out.

Nibbles: the low halves of a block's bytes come before the high ones, in 32 numbers for the old types and in 64 for the
"K" ones. A K type has 256 numbers a block, in eight groups of 32 (Q6_K: sixteen of 16) with scales of their own, which
are 6-bit (Q6_K: 8-bit) multiples of one half-precision number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchwright.hub.weight import Integers, SmallFloats

K = 256
"""Numbers in a block of a K type."""


def q4_0(blocks: torch.Tensor) -> Integers:
    scale, codes = _half(blocks, 0), _halves(blocks[..., 2:])
    return _groups(codes - 8, scale)


def q4_1(blocks: torch.Tensor) -> Integers:
    return _groups(_halves(blocks[..., 4:]), _half(blocks, 0), -_half(blocks, 2))


def q5_0(blocks: torch.Tensor) -> Integers:
    codes = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return _groups(codes - 16, _half(blocks, 0))


def q5_1(blocks: torch.Tensor) -> Integers:
    codes = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return _groups(codes, _half(blocks, 0), -_half(blocks, 2))


def q8_0(blocks: torch.Tensor) -> Integers:
    return _groups(blocks[..., 2:], _half(blocks, 0))


def q4_k(blocks: torch.Tensor) -> Integers:
    scale, least = _scales(blocks)
    return _groups(_halves(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2), scale, least)


def q5_k(blocks: torch.Tensor) -> Integers:
    scale, least = _scales(blocks)
    low = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    # Bit g of the 32 bytes is the fifth bit of group g.
    high = torch.cat([blocks[..., 16:48] >> group & 1 for group in range(8)], -1)
    return _groups(low | high << 4, scale, least)


def q6_k(blocks: torch.Tensor) -> Integers:
    low = _halves(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    pairs = blocks[..., 128:192].unflatten(-1, (2, 32))
    high = torch.cat([pairs >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    scale = blocks[..., 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return _groups((low | high << 4) - 32, scale)


def mxfp4(blocks: torch.Tensor) -> SmallFloats:
    """Read an exponent's byte, then 4-bit floats, as gpt-oss has them in another order."""
    return SmallFloats(codes_NK=_halves(blocks[..., 1:]).flatten(1), scales_NG=blocks[..., 0], bits=4)


def _groups(codes: torch.Tensor, scale: torch.Tensor, least: torch.Tensor | None = None) -> Integers:
    """Build a matrix's rows from blocks (N, B, numbers) and their groups (N, B, groups)."""
    codes = codes.flatten(1)
    return Integers(
        integers_NK=codes.view(torch.int8) if least is None else codes,
        scales_NG=scale.flatten(1),
        least_NG=None if least is None else least.flatten(1),
    )


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The half-precision number at a byte of each block, as float32 (…, 1)."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """The low halves of the bytes, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _bits(words: torch.Tensor) -> torch.Tensor:
    """The bits of four bytes, lowest first."""
    places = torch.arange(8, dtype=torch.uint8)
    return (words[..., None] >> places & 1).flatten(-2)


def _scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and least value (…, 8) of a block's groups.

    Twelve bytes hold eight scales and eight mins of 6 bits: bytes 0 to 3 and 4 to 7 the first four of each, and in
    their two highest bits the highest two of the others, whose low halves share bytes 8 to 11.
    """
    packed = blocks[..., 4:16]
    first, second, shared = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat([first & 63, shared & 15 | first >> 6 << 4], -1)
    least = torch.cat([second & 63, shared >> 4 | second >> 6 << 4], -1)
    return scale * _half(blocks, 0), least * _half(blocks, 2)


BLOCKS: dict[str, tuple[Callable[[torch.Tensor], Integers], int, int]] = {
    "Q4_0": (q4_0, 4, 32),
    "Q4_1": (q4_1, 4, 32),
    "Q5_0": (q5_0, 5, 32),
    "Q5_1": (q5_1, 5, 32),
    "Q8_0": (q8_0, 8, 32),
    "Q4_K": (q4_k, 4, 32),
    "Q5_K": (q5_k, 5, 32),
    "Q6_K": (q6_k, 6, 16),
}
"""Type → (what its blocks stand for, bits, numbers in a group)."""
FLOAT_BLOCKS: dict[str, tuple[Callable[[torch.Tensor], SmallFloats], int, int]] = {"MXFP4": (mxfp4, 4, 32)}
"""The same for types that hold no whole numbers."""
