"""4-bit weights on 8-bit activations, on the native decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchwright.core.scheme import W8A8, Scheme
from torchwright.optimization.techniques.shared.packed_weights import GroupedWeights


@dataclass(frozen=True, kw_only=True)
class W4A8(GroupedWeights):
    """Native decoder: 4-bit weights in groups, scales chosen by calibration, on 8-bit activations."""

    name: ClassVar[str] = "w4a8"
    wider: ClassVar[Scheme] = W8A8
