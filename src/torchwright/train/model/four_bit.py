"""Frozen matrices in four bits: a code for each weight, a table of sixteen values, a scale for each block of a row.

`nf4` has the quantiles of a normal distribution (Dettmers et al., 2023, appendix E), `int4` whole numbers with the
scales that `--quantize w4a8` searches (hardware/kernels/pack.py). Products use the dequantized values, which are
recomputed in the backward pass: nothing of a matrix's full size is kept.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.hardware.kernels.pack import quantize_w4

FourBits = Literal["nf4", "int4"]
BLOCK = 64
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
TABLES = {"nf4": NF4, "int4": tuple(float(value) for value in range(-8, 8))}


class FourBit(nn.Module):
    """One matrix (N, K); K is a multiple of `BLOCK`."""

    codes: torch.Tensor
    """uint8 (N, K / 2): two codes a byte, the first in the high half."""
    scale: torch.Tensor
    """float32 (N, K / BLOCK)."""
    table: torch.Tensor

    def __init__(self, shape: torch.Size, kind: FourBits, dtype: torch.dtype) -> None:
        """`dtype` is what the weights come in and go out as."""
        super().__init__()
        self.shape, self.kind, self.dtype = shape, kind, dtype
        N, K = shape
        self.register_buffer("codes", torch.empty(N, K // 2, dtype=torch.uint8))
        self.register_buffer("scale", torch.empty(N, K // BLOCK))
        self.register_buffer("table", torch.empty(16))

    def pack(self, weight_NK: torch.Tensor) -> None:
        """Take the nearest values that there are."""
        self.table.copy_(torch.tensor(TABLES[self.kind]))
        if self.kind == "int4":
            integers_NK, times_NG, scale_N = quantize_w4(weight_NK, BLOCK)
            codes_NK, scale_NG = (integers_NK + 8).to(torch.uint8), times_NG * scale_N[:, None]
        else:
            blocks_NGB = weight_NK.float().unflatten(1, (-1, BLOCK))
            scale_NG = blocks_NGB.abs().amax(2)
            edges = (self.table[1:] + self.table[:-1]).cpu() / 2
            relative = blocks_NGB / scale_NG.clamp_min(1e-30)[..., None]
            codes_NK = torch.bucketize(relative, edges).to(torch.uint8).flatten(1)
        self.codes.copy_(codes_NK[:, ::2] << 4 | codes_NK[:, 1::2])
        self.scale.copy_(scale_NG)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights (N, K) that the codes stand for."""
        return _values(self.codes, self.scale, self.table, dtype)


class FourBitLinear(nn.Module):
    """y = x · Wᵀ + b with W in four bits; inputs and outputs as `nn.Linear`'s, autocast included."""

    def __init__(self, linear: nn.Linear, kind: FourBits) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = FourBit(linear.weight.shape, kind, linear.weight.dtype)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x) if self.bias is None else self.product(x) + self.bias

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x · Wᵀ."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight = self.weight
        return _Product.apply(x, weight.codes, weight.scale, weight.table)  # type: ignore[return-value]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scale, table)
        return F.linear(x, _values(codes, scale, table, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        codes, scale, table = ctx.saved_tensors
        return gradient @ _values(codes, scale, table, gradient.dtype), None, None, None


def _values(
    codes: torch.Tensor, scale_NG: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    pairs = torch.stack([codes >> 4, codes & 15], 2).flatten(1)
    wide = table.to(torch.promote_types(dtype, torch.float32))[pairs.int()]
    return (wide.unflatten(1, (-1, BLOCK)) * scale_NG[..., None]).flatten(1).to(dtype)
