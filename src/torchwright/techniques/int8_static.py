"""8-bit weights and activations with scales fixed by calibration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import nn

from torchwright.facts import DeviceFacts
from torchwright.techniques import int8
from torchwright.techniques.base import Phase, Target, Technique


DECODE_ROWS = 16
"""Prompts have more rows than this, decode steps of small batches fewer."""


@dataclass(frozen=True, kw_only=True)
class Int8Static(Technique):
    """Linear layers and convolutions on 8-bit weights and activations, activation scales fixed by calibration."""

    name: ClassVar[str] = "int8_static"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"float_weights", "layers", "compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})

    skip: tuple[str, ...] = ()
    """Names of layers that stay in floating point."""
    min_rows: int = 0
    """Linear layers called with fewer rows run in floating point: small calls cost more to quantize than they save."""

    def variants(self, target: Target) -> Iterable[Self]:
        if "language" in target.properties:
            yield replace(self, min_rows=DECODE_ROWS)
        yield self

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return None if device.kind == "cpu" else "its kernels are oneDNN's, for x86 CPUs"

    @property
    def kernel(self) -> str | None:
        return "int8"

    def apply(self, target: Target) -> None:
        ranges = int8.observe_inputs(target, int8.LAYERS)
        swap = lambda layer: ranges.get(layer, "it is not called on the calibration inputs")
        int8.swap_layers(target, self.name, self.skip, int8.LAYERS, swap, self.min_rows)
        target.settings.rewrites.append(int8.share_quantized)

    def module_error(self, module: nn.Module, x: torch.Tensor) -> float | None:
        return int8.layer_error(module, x, int8.LAYERS)

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        return replace(self, skip=names)
