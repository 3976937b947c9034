"""Small integers out of 32-bit words, and scales for blocks of a matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unpack(words: torch.Tensor, shifts: Sequence[int], bits: int) -> torch.Tensor:
    """uint8 (…, W · len(shifts)): the `bits`-wide values at these places of each word of (…, W)."""
    out = torch.empty(*words.shape, len(shifts), dtype=torch.uint8)
    for place, shift in enumerate(shifts):  # one by one: all together would take four bytes a value
        out[..., place] = (words >> shift) & ((1 << bits) - 1)
    return out.flatten(-2)


def in_order(bits: int) -> range:
    """The places of values that follow each other from the lowest bits on."""
    return range(0, 32, bits)


def block_scales(
    scale: torch.Tensor, shape: tuple[int, int], block: tuple[int, int], begin: int, end: int
) -> torch.Tensor:
    """The scales (rows, G) of rows `begin` to `end` of a matrix of which each block has one.

    `scale` is one for each block; raises `ValueError` where their numbers differ.
    """
    grid = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))
    if scale.numel() != grid[0] * grid[1]:
        raise ValueError(f"{list(scale.shape)} scales for blocks of {list(block)} in {list(shape)}")
    return scale.reshape(grid)[torch.arange(begin, end) // block[0]].float()
