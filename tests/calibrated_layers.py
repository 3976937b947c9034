"""8-bit layers as a calibration by one input makes them."""

from __future__ import annotations

import torch
from torch import nn

from torchwright.optimization.techniques.shared.int8 import Int8Layer, activation_range
from torchwright.optimization.techniques.shared.rounding import Calibrated
from torchwright.optimization.techniques.shared.smoothing import Smoothing


def calibrated_on(layer: nn.Module, x: torch.Tensor) -> Int8Layer:
    found, smoothing = Calibrated(), Smoothing()
    found.watch(layer, x)
    smoothing.watch(layer, x)
    smooth = smoothing.found(layer)
    if smooth is None:
        return Int8Layer(layer, activation_range(x.min().item(), x.max().item()), found.rounded(layer))
    return Int8Layer(
        layer, smoothing.activation(layer, smooth), found.rounded(layer, smooth.scales_K), smooth
    )
