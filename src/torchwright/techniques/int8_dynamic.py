"""8-bit weights and activations with scales chosen at every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchwright.techniques.shared.int8_layers import Int8Layers


@dataclass(frozen=True, kw_only=True)
class Int8Dynamic(Int8Layers):
    """Linear layers on 8-bit weights and activations, activation scales chosen at every call."""

    name: ClassVar[str] = "int8_dynamic"
