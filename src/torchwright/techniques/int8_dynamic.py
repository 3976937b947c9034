"""8-bit weights and activations with scales chosen at every call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import nn

from torchwright.facts import DeviceFacts
from torchwright.techniques.base import Phase, Target, Technique
from torchwright.techniques.shared import int8


@dataclass(frozen=True, kw_only=True)
class Int8Dynamic(Technique):
    """Linear layers on 8-bit weights and activations, activation scales chosen at every call."""

    name: ClassVar[str] = "int8_dynamic"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"float_weights", "linear", "compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})

    skip: tuple[str, ...] = ()
    """Names of layers that stay in floating point."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return None if device.kind == "cpu" else "its kernels are oneDNN's, for x86 CPUs"

    @property
    def kernel(self) -> str | None:
        return "int8"

    def apply(self, target: Target) -> None:
        int8.swap_layers(target, self.name, self.skip, (nn.Linear,), int8.dynamic)

    def module_error(self, module: nn.Module, x: torch.Tensor) -> float | None:
        return int8.layer_error(module, x, (nn.Linear,))

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        return replace(self, skip=names)
