"""8-bit weights and activations with per-token activation scales, on Torchwright's own packed linear layers.

Each row of a layer's input (a token, a patch) has its own scale and centre, chosen at every call: rows never influence
each other, and nothing is calibrated. The exported graph fuses activations and residual additions into the layers, and
concatenates layers that read one input (`encoder_graph.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.core.records import DeviceFacts
from torchwright.hardware.kernels import pack
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.limits import LONGEST
from torchwright.optimization.techniques.shared.encoder_graph import fuse_layers
from torchwright.optimization.techniques.shared.int8_layers import Int8Layers


@dataclass(frozen=True, kw_only=True)
class Int8Dynamic(Int8Layers):
    """Linear layers on 8-bit weights and activations, with per-token activation scales chosen at every call."""

    name: ClassVar[str] = "int8_dynamic"
    own_kernels: ClassVar[bool] = True
    kernels: ClassVar[str] = "packed w8a8"
    rewrite: ClassVar[Callable[[torch.fx.GraphModule], None]] = fuse_layers

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return build.load_fault() if device.kind == "cpu" else "its kernels are for CPUs"

    @property
    def kernel(self) -> str | None:
        return None  # the micro-benchmark does not time this kernel

    def replace_layer(self, layer: Any) -> nn.Module | str:
        """Return the packed 8-bit layer, or the reason why the kernel does not take this one."""
        if fault := build.load_fault():  # and a process that only ranks layers has loaded nothing before
            return fault
        if layer.in_features > LONGEST:
            return f"it has {layer.in_features} input features, the kernel sums {LONGEST}"
        return RowLinear(layer)


class RowLinear(nn.Module):
    """y = x Wᵀ + b on a packed 8-bit weight; x (..., K) is quantized to 8 bits per row, y has x's dtype.

    A row that holds NaN or infinity gives a row of NaN, and changes no other row.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    sums: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = (
            layer.in_features,
            layer.out_features,
            layer.weight.dtype,
        )
        integers, scale_N = pack.quantize_w8(layer.weight.detach())
        self.register_buffer("packed", pack.pack_w8(integers))
        rows = (0, -len(scale_N) % pack.PANEL)
        self.register_buffer("scale", nn.functional.pad(scale_N, rows))
        self.register_buffer("sums", nn.functional.pad(integers.sum(1, dtype=torch.int64) * scale_N, rows))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().float())

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight in the layer's own dtype: models read the dtype to cast their inputs."""
        integers = pack.unpack_w8(self.packed, self.out_features, pack.padded_depth(self.in_features))
        wide = integers[:, : self.in_features] * self.scale[: self.out_features, None]
        return wide.to(self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, fast = input, input.dtype in (torch.float32, torch.bfloat16)
        multiply: Any = torch.ops.torchwright.linear_w8a8_fused
        tensors = self.packed, self.scale, self.sums, self.bias
        y = multiply(x if fast else x.float(), *tensors, self.out_features, "none", None)
        return y if fast else y.to(x.dtype)
