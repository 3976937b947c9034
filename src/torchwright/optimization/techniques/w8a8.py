"""8-bit weights, activations quantized row by row, on the native decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchwright.core.scheme import BF16, Scheme
from torchwright.optimization.techniques.shared.packed_weights import PackedWeights


@dataclass(frozen=True, kw_only=True)
class W8A8(PackedWeights):
    """Native decoder: 8-bit weights, per-channel, on activations quantized per token."""

    name: ClassVar[str] = "w8a8"
    wider: ClassVar[Scheme] = BF16
