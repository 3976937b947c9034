"""Convolutions over images whose channels lie side by side: packed weights, and the shapes of results.

A dense weight lies in blocks of 16 output features, each (inputs, 16), the inputs being those of a window, row after
row. `pack_pairs` converts to bfloat16, in steps of 32 inputs, each (parts, 16, 16, 2). The last block ends with the
last feature and repeats some of the block before; fewer features than a block are made up by zeros. A depthwise weight
is float32 (window height, window width, channels).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from torchwright.hardware.kernels.limits import LANES

STEP = 32
"""Inputs of a tile of bfloat16."""


def pack_dense(weight_NCHW: torch.Tensor) -> torch.Tensor:
    """The weight of a convolution of one group as `conv_dense` reads it in float32: one dimension."""
    return _blocks(weight_NCHW.detach().float()).transpose(1, 2).flatten()


def unpack_dense(packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Invert `pack_dense`; (N, C, H, W) is the shape."""
    _, C, H, W = shape
    return _unblocked(packed.view(-1, C * H * W, LANES).transpose(1, 2), shape)


def pack_pairs(weight_NCHW: torch.Tensor) -> torch.Tensor:
    """Return the weight packed in bfloat16, for inputs of the weight's type.

    Other types have two parts, whose sum is a float16 weight exactly, and a float32 one up to a relative 2^-17.
    """
    wide = weight_NCHW.detach().float()
    parts = [wide.bfloat16()]
    if weight_NCHW.dtype != torch.bfloat16:
        parts.append((wide - parts[0].float()).bfloat16())
    blocks_BPLK = torch.stack([_blocks(part) for part in parts], 1)
    steps = F.pad(blocks_BPLK, (0, -blocks_BPLK.shape[-1] % STEP)).unflatten(-1, (-1, STEP // 2, 2))
    return steps.permute(0, 3, 1, 4, 2, 5).flatten()


def unpack_pairs(packed: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Invert `pack_pairs`, up to rounding in float32; (N, C, H, W) and `dtype` are the shape and type."""
    _, C, H, W = shape
    parts, inputs = 1 if dtype == torch.bfloat16 else 2, C * H * W
    steps = packed.view(-1, (inputs + STEP - 1) // STEP, parts, STEP // 2, LANES, 2).float().sum(2).to(dtype)
    return _unblocked(steps.permute(0, 3, 1, 2, 4).flatten(2)[:, :, :inputs], shape)


def _blocks(weight_NCHW: torch.Tensor) -> torch.Tensor:
    """Blocks of 16 features, each with its inputs in the order of a window: (blocks, 16, inputs)."""
    N = len(weight_NCHW)
    rows = F.pad(weight_NCHW.movedim(1, 3).flatten(1), (0, 0, 0, max(0, LANES - N)))
    starts = [min(start, len(rows) - LANES) for start in range(0, N, LANES)]
    return torch.stack([rows[start : start + LANES] for start in starts])


def _unblocked(blocks_BLK: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    N, C, H, W = shape
    last = N - (len(blocks_BLK) - 1) * LANES
    repeated = LANES - last if N > LANES else 0
    rows = torch.cat([blocks_BLK[:-1].flatten(0, 1), blocks_BLK[-1, repeated:]])[:N]
    return rows.unflatten(1, (H, W, C)).movedim(3, 1)


def pack_depthwise(weight_C1HW: torch.Tensor) -> torch.Tensor:
    """The weight of a convolution with a group for each channel as `conv_depthwise` reads it."""
    return weight_C1HW.detach().float()[:, 0].permute(1, 2, 0).contiguous()


def pack_bias(bias_N: torch.Tensor | None, features: int) -> torch.Tensor:
    """Return the bias in float32, padded to a block; zeros without a bias."""
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
