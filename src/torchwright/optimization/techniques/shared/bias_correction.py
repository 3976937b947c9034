"""Bias correction of 8-bit layers: the mean of what rounding a layer's weight takes from its output goes to the bias.

The error of an output channel is the product of the input with the weight's rounding errors. Where inputs are not
centred (after a ReLU) the error is mostly its mean, which a bias can hold at no cost. (Nagel et al., "Data-Free
Quantization Through Weight Equalization and Bias Correction", 2019, the empirical variant.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchwright.optimization.techniques.shared.int8 import LAYERS, round_weight


class MeanErrors:
    """Gathers, over calibration calls, the mean of what rounding takes from each output channel of layers."""

    def __init__(self) -> None:
        self._sums: dict[nn.Module, torch.Tensor] = {}
        self._counts: dict[nn.Module, int] = {}

    def watch(self, layer: Any, x: torch.Tensor) -> None:
        """Count a call of a plain linear layer or convolution on `x`; other layers are passed over."""
        if type(layer) not in LAYERS or getattr(layer, "padding_mode", "zeros") != "zeros":
            return
        missing = missing_weight(layer.weight)
        if isinstance(layer, nn.Conv2d):
            settings: Any = layer.stride, layer.padding, layer.dilation, layer.groups
            error_CN = nn.functional.conv2d(x.float(), missing, None, *settings).transpose(0, -3).flatten(1)
        else:
            error_CN = nn.functional.linear(x.float(), missing).reshape(-1, len(missing)).T
        self._sums[layer] = self._sums.get(layer, torch.zeros(())) + error_CN.double().sum(1)
        self._counts[layer] = self._counts.get(layer, 0) + error_CN.shape[1]

    def shift(self, layer: nn.Module) -> torch.Tensor | None:
        """Return what to add to a layer's bias; None for a layer without calls, or with NaN or infinity in them."""
        if not self._counts.get(layer):
            return None
        mean = (self._sums[layer] / self._counts[layer]).float()
        return mean if mean.isfinite().all() else None


def missing_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return what rounding to 8 bits takes from a weight, in float32."""
    wide = weight.detach().float()
    return wide - round_weight(wide)
