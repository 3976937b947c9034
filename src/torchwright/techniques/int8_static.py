"""8-bit weights and activations with scales fixed by calibration.

Batch norms are folded first, so that activation and residual addition can join the 8-bit layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import nn

from torchwright.facts import DeviceFacts
from torchwright.techniques.base import Phase, Target, Technique
from torchwright.techniques.shared import int8
from torchwright.techniques.shared.batchnorm import fold


@dataclass(frozen=True, kw_only=True)
class Int8Static(Technique):
    """Linear layers and convolutions on 8-bit weights and activations, activation scales fixed by calibration."""

    name: ClassVar[str] = "int8_static"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    needs: ClassVar[frozenset[str]] = frozenset({"float_weights", "layers", "compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})
    calibrates: ClassVar[bool] = True

    skip: tuple[str, ...] = ()
    """Names of layers that stay in floating point."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return None if device.kind == "cpu" else "its kernels are oneDNN's, for x86 CPUs"

    @property
    def kernel(self) -> str | None:
        return "int8"

    def apply(self, target: Target) -> None:
        if "batch_norm" in target.properties:
            # What stands between a convolution and its activation keeps both from one kernel.
            fold(target.model, target.workload.cases(target.compute_dtype))
        ranges = int8.observe_inputs(target, int8.LAYERS)

        def replacement(layer: nn.Module) -> nn.Module | str:
            if layer not in ranges:
                return "it is not called on the calibration inputs"
            return int8.Int8Layer(layer, ranges[layer])

        int8.swap_layers(target, self.name, self.skip, int8.LAYERS, replacement)

    def module_error(self, module: nn.Module, x: torch.Tensor) -> float | None:
        return int8.layer_error(module, x, int8.LAYERS)

    def retreat(self, names: tuple[str, ...]) -> Self | None:
        return replace(self, skip=names)
