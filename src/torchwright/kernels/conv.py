"""Convolutions over images whose channels lie side by side: packed weights, and the shapes of results.

A dense weight lies in blocks of 16 output features, each (window height, window width, channels, 16), or (…, channels /
2, 16, 2) in bfloat16. The last block ends with the last feature and repeats some of the block before; fewer features
than a block are made up by zeros. A depthwise weight is float32 (window height, window width, channels).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from torchwright.kernels.limits import LANES


def pack_dense(weight_NCHW: torch.Tensor) -> torch.Tensor:
    """The weight of a convolution of one group, float32 or bfloat16, as `conv_dense` reads it: one dimension."""
    N, C, *_ = weight_NCHW.shape
    missing = max(0, LANES - N)
    padded = F.pad(weight_NCHW.detach(), (0, 0, 0, 0, 0, 0, 0, missing))
    starts = [min(start, N + missing - LANES) for start in range(0, N, LANES)]
    blocks_BLCHW = torch.stack([padded[start : start + LANES] for start in starts])
    if weight_NCHW.dtype != torch.bfloat16:
        return blocks_BLCHW.permute(0, 3, 4, 2, 1).flatten()
    pairs = blocks_BLCHW.unflatten(2, (C // 2, 2))
    return pairs.permute(0, 4, 5, 2, 1, 3).flatten()


def unpack_dense(packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """What `pack_dense` was given; (N, C, H, W) is its shape."""
    N, C, H, W = shape
    if packed.dtype == torch.bfloat16:
        blocks = packed.view(-1, H, W, C // 2, LANES, 2).permute(0, 4, 3, 5, 1, 2).flatten(2, 3)
    else:
        blocks = packed.view(-1, H, W, C, LANES).permute(0, 4, 3, 1, 2)
    last = N - (len(blocks) - 1) * LANES
    repeated = LANES - last if N > LANES else 0
    return torch.cat([blocks[:-1].flatten(0, 1), blocks[-1, repeated:]])[:N]


def pack_depthwise(weight_C1HW: torch.Tensor) -> torch.Tensor:
    """The weight of a convolution with a group for each channel as `conv_depthwise` reads it."""
    return weight_C1HW.detach().float()[:, 0].permute(1, 2, 0).contiguous()


def pack_bias(bias_N: torch.Tensor | None, features: int) -> torch.Tensor:
    """float32, of a block at least; zeros where there is none."""
    if bias_N is None:
        return torch.zeros(max(features, LANES))
    return F.pad(bias_N.detach().float(), (0, max(0, LANES - features)))


def out_size(size: int, window: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - window) // stride + 1


def out_shape(
    x: torch.Tensor, window: Sequence[int], stride: Sequence[int], padding: Sequence[int], features: int
) -> tuple[int, ...]:
    """(batch, features, height, width) of what a convolution makes of x."""
    sizes = zip(x.shape[2:], window, stride, padding, strict=True)
    return (x.shape[0], features, *(out_size(*each) for each in sizes))
