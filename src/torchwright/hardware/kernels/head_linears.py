"""Linear layers of single heads: each head's part of a token is multiplied by a weight of its own."""

from __future__ import annotations

from typing import Self

import torch
from torch import nn

from torchwright.hardware.kernels import ops, pack
from torchwright.hardware.kernels.cpu.memory import lasting


class HeadLinears(nn.Module):
    """y[t, h] = W[h] x[t, h]; x is (T, H, K), y (T, H, N) of x's type.

    In bfloat16 the compiled kernels of a CPU take weights that are packed head by head: a row of y depends, bitwise,
    only on its own row of x. Elsewhere it computes in plain PyTorch.
    """

    packed: torch.Tensor | None
    weight: torch.Tensor | None

    def __init__(self, weight_HNK: torch.Tensor, *, device: torch.device) -> None:
        """`device` is where the layer will run."""
        takes = weight_HNK.dtype == torch.bfloat16 and ops.on(device, weight_HNK.dtype) is ops.native
        packed = torch.stack([pack.pack_bf16(weight_NK) for weight_NK in weight_HNK]) if takes else None
        kept = None if takes else weight_HNK.contiguous()
        self._begin(packed if packed is None else lasting(packed), kept, weight_HNK.shape[1])

    def _begin(self, packed: torch.Tensor | None, weight: torch.Tensor | None, features: int) -> None:
        super().__init__()
        self.features = features
        self.register_buffer("packed", packed)
        self.register_buffer("weight", weight)

    @classmethod
    def from_tensors(cls, features: int, packed: torch.Tensor | None, weight: torch.Tensor | None) -> Self:
        """The layer around the tensors of another one's state dict; operators check their sizes."""
        layer = cls.__new__(cls)
        layer._begin(packed, weight, features)
        return layer

    def forward(self, x_THK: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            assert self.weight is not None
            return torch.einsum("thk,hnk->thn", x_THK, self.weight.to(x_THK.dtype))
        return ops.native.linear_heads(x_THK, self.packed, self.features)
