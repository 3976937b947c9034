"""4-bit weights on 16-bit activations, on the native decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchwright.techniques.packed_weights import PackedWeights


@dataclass(frozen=True, kw_only=True)
class W4A16(PackedWeights):
    """Native decoder: 4-bit weights in groups, scales chosen by calibration, on 16-bit activations."""

    name: ClassVar[str] = "w4a16"
    wider: ClassVar[str] = "w8a8"

    group_size: Literal[32, 64, 128] = 32
    """Inputs that share a scale; smaller is more exact and has more bytes."""

    @property
    def group(self) -> int:
        return self.group_size
