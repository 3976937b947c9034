"""Small floats that share a scale by blocks of neighbours, computed by ordinary arithmetic on any device.

    mxfp8    e4m3 (largest 448), blocks of 32, the scale a power of two
    mxfp4    e2m1 (largest 6), blocks of 32, the scale a power of two
    nvfp4    e2m1, blocks of 16, the scale an e4m3 number times one float32 for the whole tensor

The formats are those of the OCP Microscaling specification 1.0 and of NVIDIA's Blackwell. Scales are chosen as in
torchao's inference: powers of two are rounded up, so that no element is clipped.
"""

from __future__ import annotations

from typing import Literal

import torch

Format = Literal["nvfp4", "mxfp8", "mxfp4"]
BLOCKS: dict[Format, int] = {"nvfp4": 16, "mxfp8": 32, "mxfp4": 32}
"""Elements that share a scale."""
E2M1_LARGEST, E4M3_LARGEST, E4M3_LEAST = 6.0, 448.0, 2.0**-6
LEAST_EXPONENT, LARGEST_EXPONENT = -126, 127
"""Exponents of scales. 2^-127 exists, but float32 has it as a subnormal number: blocks so small become zeros."""


def round_blocks(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Return `x` (…, a multiple of the block), rounded to the format, in its own type.

    A block with NaN or infinity becomes NaN; in nvfp4, whose blocks share one more scale, the whole tensor.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCKS[format]))
    largest = blocks.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    if format == "nvfp4":
        finite = finite.all()
        found = _nvfp4(blocks, largest)
    elif format == "mxfp8":
        scale = _power_of_two(largest / E4M3_LARGEST)
        found = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    else:
        scale = _power_of_two(largest / E2M1_LARGEST)
        found = round_e2m1(blocks / scale) * scale
    return torch.where(finite, found, torch.nan).flatten(-2).to(x.dtype)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to 0, ½, 1, 1½, 2, 3, 4 or 6, with a sign; of two equally near ones to that of the even code."""
    size = x.abs().clamp_max(E2M1_LARGEST)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(size / step) * step * x.sign()


def _nvfp4(blocks: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    whole = largest.amax() / (E2M1_LARGEST * E4M3_LARGEST)
    whole = torch.where(whole > 0, whole, 1.0)
    own = (largest / E2M1_LARGEST / whole).clamp(E4M3_LEAST, E4M3_LARGEST).to(torch.float8_e4m3fn).float()
    return round_e2m1(blocks * ((1 / whole) / own)) * (own * whole)


def _power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Return the least power of two that is not smaller."""
    exponent = torch.ceil(torch.log2(scale)).clamp(LEAST_EXPONENT, LARGEST_EXPONENT)
    return torch.exp2(exponent)
