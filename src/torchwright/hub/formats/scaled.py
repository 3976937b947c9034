"""Weights that are stored as they are, int8 or float8, with a scale for each block, group, row or for all."""

from __future__ import annotations

import torch

from torchwright.hub.unpack import block_scales
from torchwright.hub.weight import Floats, Grouped, Integers, SmallFloats, Weight, Wide

FLOAT8 = torch.float8_e4m3fn


def scaled(
    values: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] | None,
    zeros: torch.Tensor | None = None,
    *,
    bits: int = 8,
    activations: int | None = None,
) -> Weight:
    """(values − zeros) · scale. Without a `block` (rows, columns) the scale's own shape says how many there are.

    Raises `ValueError` where shapes do not belong together.
    """
    if values.ndim != 2 or not values.numel():
        raise ValueError(f"it is {list(values.shape)}, and no matrix")
    shape = (values.shape[0], values.shape[1])
    rows, columns = block or _block(shape, scale)
    if zeros is not None and zeros.numel() != scale.numel():
        raise ValueError(f"{zeros.numel()} zeros for {scale.numel()} scales")

    def part(begin: int, end: int) -> Integers:
        each = [
            None if tensor is None else block_scales(tensor, shape, (rows, columns), begin, end)
            for tensor in (scale, zeros)
        ]
        assert each[0] is not None
        return Integers(integers_NK=values[begin:end], scales_NG=each[0], zeros_NG=each[1])

    part(0, 1)  # says now what does not fit
    if values.dtype == FLOAT8 and zeros is None:
        return Floats(shape=shape, bits=8, group=columns, part=lambda begin, end: _floats(part(begin, end)))
    grouped = Grouped(shape=shape, bits=bits, group=columns, part=part, activations=activations)
    return grouped if values.dtype == torch.int8 else Wide(shape, grouped.rows)


def _floats(found: Integers) -> SmallFloats:
    return SmallFloats(codes_NK=found.integers_NK.view(torch.uint8), scales_NG=found.scales_NG, bits=8)


def _block(shape: tuple[int, int], scale: torch.Tensor) -> tuple[int, int]:
    """Return a block's sizes for scales that are one number, one per row, or one per equal group of a row."""
    if scale.numel() == 1:
        return shape
    groups = scale.numel() // shape[0]
    if scale.numel() % shape[0] or shape[1] % groups:
        raise ValueError(f"{list(scale.shape)} scales for {list(shape)}")
    return 1, shape[1] // groups
