"""Convolutions with a padding of their own: find the padding by a call, and write it down as numbers.

EfficientNet-Lite's convolutions hold an `nn.ZeroPad2d`, timm's `Conv2dSame` pads by the size of its input. Both are
subclasses of `nn.Conv2d` with a forward of their own, which a rewrite by type has to leave alone. Here a layer is
called on images of known values. Its result must be one product with its own weight and bias, of the image with zeros
around it. If the number of zeros follows one rule at all sizes that are tried, an equal layer takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchwright.core.layer_types import attached, overridden
from torchwright.optimization.techniques.shared.wrapping import layer_input, named, replace_module
from torchwright.workloads.base import Case

Sides = tuple[int, int, int, int]
"""Zeros on the left, on the right, above and below, as `F.pad` takes them."""
PRODUCTS = (F.conv1d, F.conv2d, F.conv3d, F.linear)
SETTINGS = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
ARGUMENTS = ("input", "weight", "bias", *SETTINGS)
"""Arguments of a convolution, in their order."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """A rule for the zeros around an image."""

    fixed: Sides | None
    """The same zeros at every size; None for TensorFlow's "SAME": as many as ceil(size / stride) results need."""
    window: tuple[int, int]
    """Height and width that one result is made of."""
    stride: tuple[int, int]

    def around(self, size: Sequence[int]) -> Sides:
        """Return the zeros around an image of this height and width."""
        if self.fixed is not None:
            return self.fixed
        rows, columns = (
            max(window - 1 - (length - 1) % stride, 0)
            for length, window, stride in zip(size, self.window, self.stride, strict=True)
        )
        return columns // 2, columns - columns // 2, rows // 2, rows - rows // 2


class PaddedConv2d(nn.Conv2d):
    """A 2-D convolution that puts zeros around its input by a rule; `padding` itself is 0."""

    zeros: Padding

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(input, self.zeros.around(input.shape[-2:])))


KINDS = (nn.Conv2d, PaddedConv2d)
"""Convolutions whose padding is in numbers."""


def make_explicit(model: nn.Module, case: Case) -> None:
    """Replace convolutions with a padding of their own by equal ones, tried at the sizes of this call."""
    sizes: dict[Any, set[tuple[int, int]]] = {}

    def watch(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = layer_input(args, kwargs)
        if isinstance(x, torch.Tensor) and x.dim() >= 3:
            sizes.setdefault(layer, set()).add((x.shape[-2], x.shape[-1]))

    convolutions = (layer for _, layer in named(model, nn.Conv2d))
    own = [layer for layer in convolutions if overridden(layer, KINDS) and not attached(layer)]
    if not own:
        return
    handles = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in own]
    try:
        with torch.no_grad():
            model(*case.args, **case.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    for layer, seen in sizes.items():
        if (new := explicit(layer, seen)) is not None:
            replace_module(model, layer, new)


def pads_itself(module: nn.Module) -> bool:
    """Check whether a module is a convolution that `make_explicit` replaces, tried at small sizes alone."""
    if not isinstance(module, nn.Conv2d) or not overridden(module, KINDS):
        return False
    return explicit(module) is not None


def explicit(layer: nn.Conv2d, sizes: Iterable[tuple[int, int]] = ()) -> nn.Conv2d | None:
    """Return an equal layer whose padding is in numbers; None if the layer computes something else.

    It is tried at these heights and widths and at a few small ones, and at the next ones after each.
    """
    window = _window(layer)
    small = max(window)
    starts, following = [*sizes, (small, small + 1)], range(max(layer.stride) + 1)
    tried = [(height + i, width + i) for height, width in starts for i in following]
    found = [_product(layer, *size) for size in tried]
    products = [each for each in found if each is not None]
    if len(products) < len(found) or any(each.settings != products[0].settings for each in products):
        return None
    settings = products[0].settings
    for fixed in (products[0].sides, None):
        rule = Padding(fixed=fixed, window=window, stride=settings["stride"])
        if all(rule.around(size) == each.sides for size, each in zip(tried, products, strict=True)):
            return _with_padding(layer, rule, settings)
    return None


def _window(layer: nn.Conv2d) -> tuple[int, int]:
    rows, columns = (
        gap * (size - 1) + 1 for gap, size in zip(layer.dilation, layer.kernel_size, strict=True)
    )
    return rows, columns


@dataclass(frozen=True, kw_only=True)
class _Product:
    """The convolution in a layer's call: all zeros around the image, its own among them, and its other settings."""

    sides: Sides
    settings: dict[str, Any]


def _product(layer: nn.Conv2d, height: int, width: int) -> _Product | None:
    """Return the one product that the layer's result is for an image of this size; None if it is anything else."""
    count = layer.in_channels * height * width
    x = torch.linspace(1, 2, count, dtype=layer.weight.dtype, device=layer.weight.device)
    x = x.view(1, layer.in_channels, height, width)
    calls: list[tuple[dict[str, Any], Any]] = []

    class Products(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func in PRODUCTS:
                calls.append((dict(zip(ARGUMENTS, args, strict=False)) | (kwargs or {}), result))
            return result

    try:
        with torch.no_grad(), Products():
            y = layer.forward(x)
    except Exception:  # a forward that takes something else than an image
        return None
    if len(calls) != 1 or calls[0][1] is not y:
        return None
    given = SETTINGS | calls[0][0]
    if given["weight"] is not layer.weight or given.get("bias") is not layer.bias:
        return None
    settings = {key: _pair(given[key]) if key != "groups" else given[key] for key in SETTINGS}
    if isinstance(given["padding"], str) or (sides := _sides(x, given["input"])) is None:
        return None
    rows, columns = settings.pop("padding")
    left, right, above, below = sides
    return _Product(sides=(left + columns, right + columns, above + rows, below + rows), settings=settings)


def _sides(x: torch.Tensor, padded: torch.Tensor) -> Sides | None:
    """Return the zeros around the values of `x` in `padded`; None if it holds anything else."""
    inside = padded != 0
    height, width = x.shape[2:]
    if padded.dim() != 4 or inside.sum() != x.numel():
        return None
    left, above = (int(inside[0, 0].any(axis).int().argmax()) for axis in (0, 1))
    if not torch.equal(padded[:, :, above : above + height, left : left + width], x):
        return None
    return left, padded.shape[3] - left - width, above, padded.shape[2] - above - height


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _with_padding(layer: nn.Conv2d, rule: Padding, settings: dict[str, Any]) -> nn.Conv2d:
    """Return a layer over this layer's weights."""
    even, padding = False, (0, 0)
    if rule.fixed is not None:
        left, right, above, below = rule.fixed
        even = left == right and above == below
        padding = (above, left) if even else (0, 0)
    new = (nn.Conv2d if even else PaddedConv2d)(
        layer.in_channels,
        layer.out_channels,
        _pair(layer.kernel_size),
        padding=padding,
        bias=layer.bias is not None,
        device="meta",
        **settings,
    )
    new.weight, new.bias = layer.weight, layer.bias
    if isinstance(new, PaddedConv2d):
        new.zeros = rule
    return new.train(layer.training)
