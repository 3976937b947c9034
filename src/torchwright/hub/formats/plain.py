"""Weights as they were trained: float tensors in safetensors files."""

from __future__ import annotations

from torchwright.hub.fields import Fields
from torchwright.hub.formats.base import TensorFormat
from torchwright.hub.weight import Weight


class Unquantized(TensorFormat):
    main, others = "weight", ()

    @classmethod
    def check(cls, settings: Fields) -> None:
        """Return no quantized tensors."""

    def __str__(self) -> str:
        return "not quantized"

    def holds(self, name: str) -> bool:
        return False

    def quantized(self, base: str) -> Weight:
        raise ValueError(f"{base} is not quantized")
