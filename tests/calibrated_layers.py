"""8-bit layers as a calibration by one input makes them."""

from __future__ import annotations

import torch
from torch import nn

from torchwright.optimization.techniques.shared.int8 import Int8Layer, activation_range
from torchwright.optimization.techniques.shared.rounding import Calibrated


def calibrated_on(layer: nn.Module, x: torch.Tensor) -> Int8Layer:
    found = Calibrated()
    found.watch(layer, x)
    return Int8Layer(layer, activation_range(x.min().item(), x.max().item()), found.rounded(layer))
