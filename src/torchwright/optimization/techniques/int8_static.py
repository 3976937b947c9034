"""8-bit weights and activations with scales fixed by calibration.

Batch norms are folded first, so that activation and residual addition can join the 8-bit layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from torchwright.core.layer_types import overridden
from torchwright.optimization.techniques.base import Target
from torchwright.optimization.techniques.shared.batchnorm import fold
from torchwright.optimization.techniques.shared.int8 import LAYERS, Int8Layer, observe_inputs
from torchwright.optimization.techniques.shared.int8_layers import Int8Layers, Replacement
from torchwright.optimization.techniques.shared.own_padding import make_explicit, pads_itself
from torchwright.optimization.techniques.shared.rounded_products import Rounded
from torchwright.optimization.techniques.shared.rounding import Calibrated
from torchwright.optimization.techniques.shared.smoothing import Smoothing
from torchwright.optimization.techniques.shared.wrapping import stand_in_error


@dataclass(frozen=True, kw_only=True)
class Int8Static(Int8Layers):
    """Linear layers and convolutions on 8-bit weights and activations, activation scales fixed by calibration."""

    name: ClassVar[str] = "int8_static"
    needs: ClassVar[frozenset[str]] = frozenset({"float_weights", "layers", "compiled", "float32_range"})
    kinds: ClassVar[tuple[type[nn.Module], ...]] = LAYERS

    smooth: bool = True
    """Equalize the input features of linear layers where that clearly lowers their error (SmoothQuant)."""

    @property
    def calibrates(self) -> bool:
        return True

    def replacements(self, target: Target) -> Replacement:
        cases = target.workload.cases(target.compute_dtype)
        make_explicit(target.model, cases[0])
        if "batch_norm" in target.properties:
            # What stands between a convolution and its activation keeps both from one kernel.
            fold(target.model, cases)
        calibrated, smoothing = Calibrated(), Smoothing()

        def watch(layer: nn.Module, x: torch.Tensor) -> None:
            calibrated.watch(layer, x)
            if self.smooth:
                smoothing.watch(layer, x)

        ranges = observe_inputs(target, self.kinds, watch)

        def replacement(layer: nn.Module) -> nn.Module | str:
            if layer not in ranges:
                return "it is not called on the calibration inputs"
            smooth = smoothing.found(layer)
            if smooth is None:
                return Int8Layer(layer, ranges[layer], calibrated.rounded(layer))
            rounded = calibrated.rounded(layer, smooth.scales_K)
            return Int8Layer(layer, smoothing.activation(layer, smooth), rounded, smooth)

        return replacement

    @property
    def errors_add(self) -> bool:
        return True

    def module_error(self, module: nn.Module, x: torch.Tensor) -> float | None:
        return stand_in_error(module, self.stand_in(module), x)

    def stand_in(self, module: nn.Module) -> nn.Module | None:
        taken = not overridden(module, self.kinds) or pads_itself(module)
        return Rounded(module, smooth=self.smooth) if taken else None
