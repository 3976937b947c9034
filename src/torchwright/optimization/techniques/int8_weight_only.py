"""8-bit weights alone: half the bytes to read, and nothing lost on activations.

The operator is `aten._weight_int8pack_mm`. By itself it is quick for a few rows only; compiled with autotuning it
becomes one of Inductor's C++ GEMM templates, which widens the integers on their way into the matrix units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.core.records import DeviceFacts
from torchwright.optimization.techniques.base import Settings, Target
from torchwright.optimization.techniques.shared.int8 import quantize_weight
from torchwright.optimization.techniques.shared.int8_layers import Int8Layers
from torchwright.optimization.techniques.shared.wrapping import named

WORTH = 0.05
"""Share of the linear layers' time in bfloat16 that reading fewer bytes must save."""


@dataclass(frozen=True, kw_only=True)
class Int8WeightOnly(Int8Layers):
    """Keep the weights of linear layers in 8 bits, per-channel; arithmetic stays in bfloat16."""

    name: ClassVar[str] = "int8_weight_only"
    tolerance: ClassVar[float] = 0.03
    kernels: ClassVar[str] = "C++ GEMM of bfloat16 by 8-bit weights"

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return None if device.kind == "cpu" else "its kernels are for CPUs; torchao's are for cards"

    @property
    def kernel(self) -> str | None:
        return None  # the micro-benchmark has no row of it

    def refuse(self, target: Target) -> str | None:
        if fault := super().refuse(target):
            return fault
        rate, spent = target.device.read_gb_per_s, target.kernel_seconds.get("bfloat16")
        if not rate or not spent:
            return None
        passes = sum(case.repeat for case in target.workload.cases(torch.float32))
        fewer_bytes = sum(layer.weight.numel() for _, layer in named(target.model, nn.Linear))
        saved = passes * fewer_bytes / (rate * 1e9)
        if saved >= WORTH * spent:
            return None
        return (
            f"its linear layers take {spent * 1e3:.2f} ms in bfloat16, of which half the bytes to read save "
            f"{saved * 1e3:.2f} ms at most: under {WORTH:.0%}"
        )

    def replace_layer(self, layer: Any) -> nn.Module | str:
        return Int8WeightLinear(layer)

    def compile_with(self, settings: Settings) -> None:
        settings.inductor |= {
            "max_autotune": True,
            "max_autotune_gemm_backends": "CPP,ATEN",
            "autotune_num_choices_displayed": 0,
        }


class Int8WeightLinear(nn.Module):
    """y = (x Wᵀ) · scale + b on 8-bit W [N, K], in bfloat16; y has x's type."""

    integers: torch.Tensor
    scale: torch.Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        integers, scale_N = quantize_weight(layer.weight)
        self.register_buffer("integers", integers)
        self.register_buffer("scale", scale_N.bfloat16())
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
        self.in_features, self.out_features, self.dtype = (
            layer.in_features,
            layer.out_features,
            layer.weight.dtype,
        )

    @property
    def weight(self) -> torch.Tensor:
        """The weight in the layer's own type: models read it to cast what they pass in."""
        return (self.integers * self.scale[:, None].float()).to(self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x_MK = input.reshape(-1, self.in_features).bfloat16().contiguous()
        y_MN = torch.ops.aten._weight_int8pack_mm(x_MK, self.integers, self.scale)
        y = y_MN.to(input.dtype).reshape(*input.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)
