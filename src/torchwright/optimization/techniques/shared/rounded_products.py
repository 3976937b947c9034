"""Layers whose products have 8-bit operands, in float32: a stand-in that shows what 8 bits lose, whatever runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchwright.optimization.techniques.shared.int8 import RoundedWeight, round_rows
from torchwright.optimization.techniques.shared.rounding import (
    Moments,
    convolution_patches,
    linear_patches,
    rounded_weight,
)
from torchwright.optimization.techniques.shared.smoothing import Smooth, smooth_of
from torchwright.optimization.techniques.shared.wrapping import linear_of

NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
"""Arguments of a product, in their order."""


class Rounded(nn.Module):
    """A layer whose products are of an 8-bit input, by the range of the call, and 8-bit weights, per-channel.

    Weights are rounded, biases corrected and inputs smoothed by the inputs of the first call. The layer's own forward
    runs, so that a subclass may pad its input or standardize its weight before they are rounded. Hooks of the layer are
    not called.
    """

    def __init__(self, layer: nn.Module, *, smooth: bool = True) -> None:
        super().__init__()
        self._forward: Callable[..., torch.Tensor] = layer.forward
        self._products: list[Product] = []
        self._smooth = smooth

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with RoundProducts(self._products, smooth=self._smooth):
            return self._forward(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A layer's rounded weight, and the module that multiplies its input before rounding."""

    rounded: RoundedWeight
    smooth: Smooth | None = None


class RoundProducts(TorchFunctionMode):
    """While entered, linear layers and 2-D convolutions compute with rounded inputs and weights.

    `products` holds them in the order of the calls; missing ones are added.
    """

    def __init__(self, products: list[Product], *, smooth: bool) -> None:
        super().__init__()
        self._products, self._smooth, self._count = products, smooth, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in (F.linear, F.conv2d):
            return func(*args, **(kwargs or {}))
        given: dict[str, Any] = dict(zip(NAMES, args, strict=False)) | dict(kwargs or {})
        if not given["input"].numel():  # an expert to whom no row was sent
            return func(**given)
        if self._count == len(self._products):
            self._products.append(_product(func, given, smooth=self._smooth))
        product, x, weight = self._products[self._count], given["input"], given["weight"]
        rounded = product.rounded
        self._count += 1
        scale = rounded.scale.view(-1, *[1] * (weight.dim() - 1))
        bias, shift = given.get("bias"), rounded.shift.to(weight.dtype)
        given |= {
            "input": round_input(x if product.smooth is None else product.smooth(x)),
            "weight": (rounded.integers * scale).to(weight.dtype),
            "bias": shift if bias is None else bias + shift,
        }
        return func(**given)


def _product(func: Any, given: dict[str, Any], *, smooth: bool) -> Product:
    """Return the product that calibration by this call alone would choose."""
    x, weight = given["input"], given["weight"]
    if func is F.linear:
        moments = Moments(convolves=False)
        moments.add(linear_patches(x))
        found = smooth_of(linear_of(weight, None), x) if smooth else None
        if found is None:
            return Product(rounded=rounded_weight(weight, moments))
        rounded = rounded_weight(weight.float() * found.scales_K, moments.divided(found.scales_K))
        return Product(rounded=rounded, smooth=found)
    sides = {
        key: _pair(given.get(key, other)) for key, other in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    moments = Moments(convolves=True)
    moments.add(
        convolution_patches(
            x if x.dim() == 4 else x[None],
            weight.shape[2:],
            stride=sides["stride"],
            padding=[(pad, pad) for pad in sides["padding"]],
            dilation=sides["dilation"],
            groups=given.get("groups", 1),
        )
    )
    return Product(rounded=rounded_weight(weight, moments))


def _pair(value: Any) -> tuple[int, ...]:
    """Return a setting of both axes. "same" padding is taken for none: few patches are at the border."""
    if isinstance(value, str):
        return (0, 0)
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


def round_input(x: torch.Tensor) -> torch.Tensor:
    """Round to the steps that a calibration by this tensor alone would choose."""
    return round_rows(x.float(), x.dim()).to(x.dtype)
