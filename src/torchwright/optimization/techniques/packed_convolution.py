"""Convolutions on Torchwright's own kernels, whose call costs less than oneDNN's.

oneDNN prepares a convolution again at every call, 22 us on an AMX machine; in small nets that is more than the
arithmetic of most layers. Ours take 3 us, and the operators before and after a layer are fused into it in the
exported graph (`shared/convolution_graph.py`). Large layers stay in float32: with AVX-512 ours keep up with oneDNN's
at any size, and on a machine with tiles they multiply in bfloat16, each value as the sum of two
(`hardware/kernels/conv.py`). Linear layers at small batch sizes, as after a net's last mean, take the same path, which
reads weights once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.core.layer_types import deviation, overridden
from torchwright.core.records import DeviceFacts
from torchwright.hardware.kernels import conv
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.limits import LANES
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.batchnorm import fold
from torchwright.optimization.techniques.shared.convolution_graph import fuse_convolutions
from torchwright.optimization.techniques.shared.wrapping import layer_input, named, replace_module

TYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = (nn.Conv2d, nn.Linear)
VECTORS = ("amx", "avx512")
"""Instruction sets with vectors of 16 numbers (plain float32 was measured with AVX-512)."""
WIDTHS = (3, 5, 7)
"""Windows of the depthwise kernels."""
SAVED = 2e-5
"""Seconds by which a call is cheaper than oneDNN's (docs/log.md, 23 November)."""
LEAST = 0.03
"""Share of the arithmetic's time that must be saved for a trial to be worth it."""
FEWEST = 16
"""Pixels of a call that fill a tile; fewer read the weights once, and float32 has no more bytes of them."""
MOST_FIRST = 9
"""Places of a picture's first window; with more, arithmetic is most of its time (a 7x7 window takes as long as
oneDNN's)."""
MOST_ROWS = 8
"""The batch size of a linear layer up to which ours took 1.2 to 1.6 times less than oneDNN's (0.94 to 1.01 from 32
on).
"""
NONE_FOUND = "the model has no 1x1 or depthwise 2-D convolution whose call is much of its cost"


@dataclass(frozen=True, kw_only=True)
class PackedConvolution(Technique):
    """Convolutions, and linear layers of few rows, on Torchwright's kernels, with what is around them joined."""

    name: ClassVar[str] = "packed_convolution"
    phase: ClassVar[Phase] = Phase.WEIGHTS
    own_kernels: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"compiled", "convolution", "float_weights"})
    removes: ClassVar[frozenset[str]] = frozenset({"float_weights"})

    most_products: int = 5_000_000
    """Dense layers with more multiplications in a call stay, but float32 with AVX-512 or tiles: their call is little of
    the cost."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return build.load_fault() if device.kind == "cpu" else "its kernels are for CPUs"

    def refuse(self, target: Target) -> str | None:
        if not any(named(target.model, nn.Conv2d)):
            return "the model has no 2-D convolution"
        if all(_reason(layer) for _, layer in named(target.model, nn.Conv2d)):
            return NONE_FOUND  # for which the model need not be called
        products = _products(target.model, target.workload.cases(target.compute_dtype)[0])
        layers = [layer for _, layer in named(target.model, KINDS) if self._left(layer, products) is None]
        convolutions = [layer for layer in layers if not isinstance(layer, nn.Linear)]
        if not convolutions:
            return NONE_FOUND
        rate, saved = target.device.tflops.get("float32"), SAVED * len(layers)
        arithmetic = 2 * sum(products.values()) / (rate * 1e12) if rate else 0.0
        if saved < LEAST * arithmetic and not any(map(_split, convolutions)):
            return (
                f"{len(layers)} layers would save {saved * 1e3:.2f} ms of more than "
                f"{arithmetic * 1e3:.0f} ms of arithmetic"
            )
        return None

    def apply(self, target: Target) -> None:
        cases = target.workload.cases(target.compute_dtype)
        if "batch_norm" in target.properties:
            # What follows a layer can join it only where no batch norm stands between.
            fold(target.model, cases)
        products = _products(target.model, cases[0])
        found = list(named(target.model, KINDS))
        left: dict[str, str] = {}
        for name, layer in found:
            reason = self._left(layer, products)
            if reason:
                left[name] = reason
            if isinstance(layer, nn.Linear):
                if not reason:
                    replace_module(target.model, layer, PackedLinear(layer))
            elif overridden(layer, KINDS):
                continue  # its forward may view the weight as it lies
            elif reason:
                layer.to(memory_format=torch.channels_last)
            else:
                few = products[layer] < FEWEST * layer.weight.numel()
                tiles = _split(layer) and not few and not _is_first(layer)
                replace_module(target.model, layer, PackedConv2d(layer, tiles=tiles))
        target.settings.rewrites.append(fuse_convolutions)
        self.cover(
            target,
            len(found),
            unit="2-D convolutions and linear layers",
            kernel=f"packed {str(target.compute_dtype).removeprefix('torch.')}",
            skipped=left,
        )

    def _left(self, layer: Any, products: dict[nn.Module, int]) -> str | None:
        """Why a layer stays as it is, or None."""
        linear = isinstance(layer, nn.Linear)
        if reason := _reason_of_linear(layer) if linear else _reason(layer):
            return reason
        if layer not in products:
            return "it is not called on the example inputs"
        if linear:
            rows = products[layer] // layer.weight.numel()
            return f"its {rows:,} rows are more than {MOST_ROWS}" if rows > MOST_ROWS else None
        if layer.groups == 1 and products[layer] > self.most_products and not _at_any_size(layer):
            return f"its {products[layer]:,} multiplications take much longer than a call"
        return None


class PackedConv2d(nn.Module):
    """A convolution of (B, C, H, W), dense or depthwise, on packed weights; the result lies channels-last.

    Its input and result have the type of the layer's weight; a dense float32 one is multiplied on `tiles` or not.
    """

    packed: torch.Tensor
    bias: torch.Tensor

    def __init__(self, layer: Any, *, tiles: bool) -> None:
        super().__init__()
        self.depthwise, self.features, self.dtype = layer.groups > 1, layer.out_channels, layer.weight.dtype
        self.window, self.stride, self.padding = list(layer.kernel_size), list(layer.stride), _padding(layer)
        self.shape, self.pairs = layer.weight.shape, tiles or self.dtype != torch.float32
        self.planes = _is_first(layer)
        dense = conv.pack_pairs if self.pairs else conv.pack_dense
        self.register_buffer(
            "packed", conv.pack_depthwise(layer.weight) if self.depthwise else dense(layer.weight)
        )
        self.register_buffer("bias", conv.pack_bias(layer.bias, self.features))

    @property
    def weight(self) -> torch.Tensor:
        """The weight as the convolution had it, within rounding: models read its type."""
        if self.depthwise:
            return self.packed.permute(2, 0, 1)[:, None].to(self.dtype)
        if self.pairs:
            return conv.unpack_pairs(self.packed, self.shape, self.dtype)
        return conv.unpack_dense(self.packed, self.shape)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        ops: Any = torch.ops.torchwright
        x = input.to(self.dtype)
        if not self.planes:
            x = x.contiguous(memory_format=torch.channels_last)
        sizes = self.window, self.stride, self.padding
        if self.depthwise:
            y = ops.conv_depthwise(x, self.packed, self.bias, *sizes, "none")
        else:
            y = ops.conv_dense(x, self.packed, self.bias, *sizes, self.features, "none", None)
        return y.to(input.dtype)


class PackedLinear(nn.Module):
    """A float32 linear layer as the 1x1 window of pictures of one pixel."""

    packed: torch.Tensor
    bias: torch.Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("packed", conv.pack_dense(layer.weight[:, :, None, None]))
        self.register_buffer("bias", conv.pack_bias(layer.bias, self.out_features))

    @property
    def weight(self) -> torch.Tensor:
        """The weight as the layer had it: models read its type."""
        return conv.unpack_dense(self.packed, (self.out_features, self.in_features, 1, 1)).flatten(1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, sizes = input.float().reshape(-1, self.in_features, 1, 1), ([1, 1], [1, 1], [0, 0])
        y = torch.ops.torchwright.conv_dense(
            x, self.packed, self.bias, *sizes, self.out_features, "none", None
        )
        return y.reshape(*input.shape[:-1], self.out_features).to(input.dtype)


def _products(model: nn.Module, case: Any) -> dict[nn.Module, int]:
    """Convolution or linear layer → multiplications of its largest call in one case."""
    products: dict[nn.Module, int] = {}

    def count(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: torch.Tensor) -> None:
        # Unbatched images have three dimensions, which the kernels do not take.
        if isinstance(layer, nn.Linear) or layer_input(args, kwargs).dim() == 4:
            products[layer] = max(products.get(layer, 0), y.numel() * layer.weight[0].numel())

    handles = [layer.register_forward_hook(count, with_kwargs=True) for _, layer in named(model, KINDS)]
    try:
        with torch.no_grad():
            model(*case.args, **case.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return products


def _split(layer: nn.Conv2d) -> bool:
    """Check whether a layer needs more exact products than bfloat16's, which tiles compute."""
    return layer.groups == 1 and layer.weight.dtype != torch.bfloat16 and torch.ops.torchwright.isa() == "amx"


def _is_first(layer: nn.Conv2d) -> bool:
    """Check whether a layer reads a picture's few planes as they are, which oneDNN interleaves at every call."""
    small = (
        layer.groups == 1
        and layer.in_channels < LANES
        and layer.weight[0, 0].numel() in range(2, MOST_FIRST + 1)
    )
    return small and layer.weight.dtype == torch.float32 and torch.ops.torchwright.isa() in VECTORS


def _at_any_size(layer: nn.Conv2d) -> bool:
    """Check whether a dense layer of any size is as fast on our kernels as on oneDNN's (docs/log.md, 27 November)."""
    plain = layer.groups == 1 and layer.weight.dtype == torch.float32
    return _split(layer) or (plain and torch.ops.torchwright.isa() == "avx512")


def _padding(layer: nn.Conv2d) -> list[int] | None:
    """Zeros on each side of the height and the width, or None where the two sides differ."""
    if layer.padding == "valid":
        return [0, 0]
    if layer.padding == "same":
        return [size // 2 for size in layer.kernel_size] if all(s % 2 for s in layer.kernel_size) else None
    return [int(zeros) for zeros in layer.padding]


def _reason_of_linear(layer: nn.Linear) -> str | None:
    """Return why these kernels do not support a linear layer, or why it cannot be replaced."""
    if reason := deviation(layer, (nn.Linear,)):
        return reason
    if layer.weight.dtype != torch.float32 or torch.ops.torchwright.isa() not in VECTORS:
        return "oneDNN's takes no longer"
    return None


def _reason(layer: Any) -> str | None:
    """Return why these kernels do not support a convolution, or why it cannot be replaced."""
    if reason := deviation(layer, (nn.Conv2d,)):
        return reason
    if layer.weight.dtype not in TYPES:
        return f"its weight is {layer.weight.dtype}"
    padding = _padding(layer)
    if layer.dilation != (1, 1) or layer.padding_mode != "zeros" or padding is None:
        return "its window is dilated, or padded by something else than zeros on both sides"
    if any(zeros >= size for zeros, size in zip(padding, layer.kernel_size, strict=True)):
        return "its padding is as wide as its window"
    if layer.groups == 1:
        if layer.weight.dtype == torch.float16 and not _split(layer):
            return "float16 is multiplied on tiles alone"
        taken = _is_first(layer) or (_split(layer) and layer.in_channels >= LANES)
        if layer.kernel_size != (1, 1) and not taken:
            return f"its window is {layer.kernel_size[0]} x {layer.kernel_size[1]}, over all channels"
    elif not layer.groups == layer.in_channels == layer.out_channels:
        return "its groups are more than a channel, or give more than one"
    elif layer.groups < LANES or layer.kernel_size[1] not in WIDTHS:
        return f"it has fewer than {LANES} channels, or a window {layer.kernel_size[1]} wide"
    return None
