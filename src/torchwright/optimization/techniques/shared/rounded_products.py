"""Layers whose products have 8-bit operands, in float32: a stand-in that shows what 8 bits lose, whatever runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchwright.optimization.techniques.shared.int8 import largest_activation, round_rows, round_weight


class Rounded(nn.Module):
    """A layer whose products are of an 8-bit input, by the range of the call, and 8-bit weights, per-channel.

    The layer's own forward runs, so that a subclass may pad its input or standardize its weight before they are
    rounded. Hooks of the layer are not called.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._forward: Callable[..., torch.Tensor] = layer.forward

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with RoundProducts():
            return self._forward(*args, **kwargs)


class RoundProducts(TorchFunctionMode):
    """While entered, linear layers and 2-D convolutions compute with rounded inputs and weights."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = dict(kwargs or {})
        if func in (F.linear, F.conv2d):
            given |= zip(("input", "weight"), args, strict=False)
            given["input"], given["weight"] = round_input(given["input"]), round_weight(given["weight"])
            args = args[2:] and (given.pop("input"), given.pop("weight"), *args[2:])
        return func(*args, **given)


def round_input(x: torch.Tensor) -> torch.Tensor:
    """Round to the steps that a calibration by this tensor alone would choose."""
    return round_rows(x.float(), largest_activation(), x.dim()).to(x.dtype)
