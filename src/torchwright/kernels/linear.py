"""Linear layers over packed weights: the modules that hold them, and what they compute in plain PyTorch.

Schemes: `bf16`; `w8a8`, 8-bit weights per output feature on activations quantized per row in the kernel; `w4a8` and
`w4a16`, 4-bit weights in groups along the input on 8-bit or bfloat16 activations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchwright.kernels import ops, pack

SCHEMES = ("bf16", "w8a8", "w4a8", "w4a16")


class PackedLinear(nn.Module):
    """y = x Wᵀ + b on a packed weight; x is float32 or bfloat16 (..., K), y has x's type.

    A row of y does not depend on the other rows of x, to the bit (on the compiled kernels).
    """

    packed: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        scheme: str,
        *,
        group_size: int = 32,
        importance_K: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        if scheme not in SCHEMES:
            raise ValueError(f"scheme is {scheme}; one of {', '.join(SCHEMES)} is wanted")
        if group_size not in pack.GROUPS:
            raise ValueError(f"group_size is {group_size}; 32, 64 or 128 is wanted")
        self.out_features, self.in_features = weight_NK.shape
        self.scheme, self.group_size = scheme, group_size
        scale = None
        if scheme == "bf16":
            packed = pack.pack_bf16(weight_NK)
        elif scheme == "w8a8":
            integers, scale_N = pack.quantize_w8(weight_NK)
            packed = pack.pack_w8(integers)
            scale = nn.functional.pad(scale_N, (0, -len(scale_N) % pack.PANEL))
        else:
            integers, scales = pack.quantize_w4(weight_NK, group_size, importance_K)
            packed = pack.pack_w4(integers, scales, group_size)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias_N is None else bias_N.detach().float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not ops.fast(x):
            return self.reference(x)
        op: Any = getattr(ops.native, f"linear_{self.scheme}")
        if self.scheme == "bf16":
            return op(x, self.packed, self.bias, self.out_features)
        if self.scheme == "w8a8":
            return op(x, self.packed, self.scale, self.bias, self.out_features)
        return op(x, self.packed, self.bias, self.out_features, self.group_size)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """The same in plain PyTorch: the weight made wide, activations rounded as the scheme rounds them."""
        wide = x.float() if x.dtype != torch.float64 else x
        if self.scheme.endswith("a8"):
            peak = wide.abs().amax(-1, keepdim=True)
            wide = torch.round(wide * torch.where(peak > 0, 127 / peak, 0)) * (peak / 127)
        else:
            wide = x.bfloat16().to(wide.dtype)
        y = nn.functional.linear(wide, self.wide_weight().to(wide.dtype))
        return (y if self.bias is None else y + self.bias.to(y.dtype)).to(x.dtype)

    def wide_weight(self) -> torch.Tensor:
        """The weight that the integers stand for, float32 (N, K)."""
        depth = pack.padded_depth(self.in_features, 0 if self.scheme in ("bf16", "w8a8") else self.group_size)
        if self.scheme == "bf16":
            wide = pack.unpack_bf16(self.packed, self.out_features, depth).float()
        elif self.scheme == "w8a8":
            assert self.scale is not None
            wide = pack.unpack_w8(self.packed, self.out_features, depth).float()
            wide *= self.scale[: self.out_features, None]
        else:
            integers, scales = pack.unpack_w4(self.packed, self.out_features, depth, self.group_size)
            wide = integers.float() * scales.float().repeat_interleave(self.group_size, 1)
        return wide[:, : self.in_features]

    def extra_repr(self) -> str:
        group = "" if self.scheme in ("bf16", "w8a8") else f", group_size={self.group_size}"
        return f"{self.in_features}, {self.out_features}, scheme={self.scheme}{group}"
