"""8-bit integer layers, written as quantize → dequantize → layer so that Inductor puts oneDNN's int8 kernels there.

The form is the output of PyTorch's own PT2E flow (`quantized_decomposed` operators around a float layer). It runs
anywhere, slowly. Compiled with freezing on an x86 CPU the pattern becomes one `onednn.qlinear_pointwise` or
`qconv_pointwise`. The weight is packed ahead of time; the following activation and re-quantization are fused in.
Activations between layers keep the model's own dtype, float32 or bfloat16; `int8_graph.py` joins the quantizations
that they share.

Weights: symmetric, per-channel. Activations: asymmetric uint8; per-tensor if calibrated, or per-token at the call.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the quantized_decomposed operators
from torch import nn

from torchwright.optimization.techniques.base import Target
from torchwright.optimization.techniques.shared.own_padding import PaddedConv2d, Padding
from torchwright.optimization.techniques.shared.wrapping import layer_input

ops = torch.ops.quantized_decomposed
LAYERS = (nn.Linear, nn.Conv2d, PaddedConv2d)
STEPS = 255
"""Steps between the least and the largest 8-bit activation."""
SMALLEST_STEP = 1e-38
"""About the smallest normal float32: rows of smaller steps become zeros."""
BODIES = (torch.float32, torch.bfloat16)
"""Types in which Inductor matches the layer around the integers; another type computes in float32."""
REGISTER = "_register_quantization_weight_pack_pass"
"""The function's name in torch, and in torchao, which took it over."""
IN_PLACE = "_qlinear_binary_can_be_inplace"
"""The function by which Inductor decides whether a sum takes the place of an operand."""


@dataclass(frozen=True, kw_only=True)
class RoundedWeight:
    """A weight in 8 bits: `integers` of its shape, a `scale` per output channel, and what to add to the bias."""

    integers: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor


def quantize_weight(weight: torch.Tensor, largest: int = 127) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 weight, float32 scale per output channel): symmetric, round to nearest, range ±`largest`."""
    flat = weight.detach().float().flatten(1)
    scale = flat.abs().amax(1).clamp_min(1e-12) / largest
    steps = weight.detach().float() / scale.view(-1, *[1] * (weight.dim() - 1))
    return torch.round(steps).clamp(-largest, largest).to(torch.int8), scale


def round_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight that 8-bit layers would multiply by, in its own type."""
    integers, scale = quantize_weight(weight, largest_weight())
    return (integers * scale.view(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)


@functools.cache
def largest_weight() -> int:
    """The largest weight by which oneDNN multiplies 8-bit activations exactly on this machine: 127, or 63.

    Without VNNI it sums the products of two neighbours in 16 bits, which 2 · 255 · 127 overflows: on AVX2 half of such
    a sum is lost, and up to 31% of the largest output of random integers. ONNX Runtime and OpenVINO do the same. It is
    the weights that give up a bit: they have a scale per output channel, and activations have one in all.
    """
    x, weight = torch.full((1, 4), 255, dtype=torch.uint8), torch.full((1, 4), 127, dtype=torch.int8)
    scale, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    onednn = torch.ops.onednn
    try:
        packed = onednn.qlinear_prepack(weight, None)
        got = onednn.qlinear_pointwise(
            x, 1.0, 0, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
    except (AttributeError, RuntimeError, NotImplementedError):  # a build or processor without the kernel
        return 127
    return 127 if got.item() == 4 * 255 * 127 else 63


def activation_range(low: float, high: float) -> tuple[float, int]:
    """Return (scale, zero point) of `STEPS` steps for values in [low, high].

    The whole range is kept, because clipping for the least squared error moves the mean of an activation. Over the
    layers of a random ResNet-50 clipping costs 14% of the output, the full range 2% (MiniLM's shape: 2.0% and 0.8%).
    """
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / STEPS, 1e-9)
    return scale, max(0, min(STEPS, round(-low / scale)))


class Int8Layer(nn.Module):
    """A linear layer or 2-D convolution on 8-bit weights and activations.

    `activation` is (scale, zero point) of its input. With None each call takes those of each row: a token of a linear
    layer's input, a picture of a convolution's. oneDNN has no kernel for scales per row. Without `rounded` weights are
    rounded to the nearest. `smooth` multiplies the input first; the weight was divided by its factors before rounding.

    NaN and infinity in its input become NaN. Integers have neither: compiled code does not take such calls.
    """

    def __init__(
        self,
        layer: nn.Module,
        activation: tuple[float, int] | None,
        rounded: RoundedWeight | None = None,
        smooth: nn.Module | None = None,
    ) -> None:
        super().__init__()
        assert isinstance(layer, LAYERS)
        assert smooth is None or rounded is not None
        self.smooth = smooth
        integers, scale = (
            (rounded.integers, rounded.scale) if rounded else quantize_weight(layer.weight, largest_weight())
        )
        self.register_buffer("integers", integers)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("weight_zero", torch.zeros(len(scale), dtype=torch.int64))
        bias = None if layer.bias is None else layer.bias.detach().float()
        if rounded is not None:
            bias = rounded.shift if bias is None else bias + rounded.shift
        self.register_buffer("bias", bias)
        self.activation, self.dtype = activation, layer.weight.dtype
        self.convolution: Any = None
        self.zeros: Padding | None = layer.zeros if isinstance(layer, PaddedConv2d) else None
        if isinstance(layer, nn.Conv2d):
            self.convolution = {
                key: getattr(layer, key) for key in ("stride", "padding", "dilation", "groups")
            }

    @property
    def weight(self) -> torch.Tensor:
        """The weight in the layer's own type: models read it to cast what they pass in (transformers' ViT does)."""
        wide = self._wide_weight()
        return (wide if self.smooth is None else self.smooth(wide)).to(self.dtype)

    def _wide_weight(self) -> torch.Tensor:
        return ops.dequantize_per_channel.default(
            self.integers, self.weight_scale, self.weight_zero, 0, -127, 127, torch.int8
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input if self.smooth is None else self.smooth(input)
        sides = None if self.zeros is None else self.zeros.around(x.shape[-2:])
        if self.activation is None:
            x = x if sides is None else nn.functional.pad(x, sides)
            wide = round_rows(x.float(), 1 if self.convolution is None else 3)
        else:
            scale, zero = self.activation
            q = ops.quantize_per_tensor.default(x, scale, zero, 0, STEPS, torch.uint8)
            if sides is not None:  # of integers, which the layer before writes directly
                q, x = nn.functional.pad(q, sides, value=zero), nn.functional.pad(x, sides)
            wide = ops.dequantize_per_tensor.default(q, scale, zero, 0, STEPS, torch.uint8)
            if (
                not torch.compiler.is_compiling()
            ):  # a graph has the pattern alone (`int8_graph.keep_not_finite`)
                wide = torch.where(x.isfinite(), wide, math.nan)
        body = x.dtype if x.dtype in BODIES else torch.float32
        wide, weight = wide.to(body), self._wide_weight().to(body)
        bias: Any = None if self.bias is None else self.bias.to(body)
        if self.convolution is None:
            y = nn.functional.linear(wide, weight, bias)
        else:
            y = nn.functional.conv2d(wide, weight, bias, **self.convolution)
        return y if body == x.dtype else y.to(x.dtype)


def round_rows(x: torch.Tensor, dims: int) -> torch.Tensor:
    """Round each row, the last `dims` dimensions of x, to `STEPS` equal steps from its minimum to its maximum.

    The range includes zero. A row that holds NaN or infinity becomes NaN.
    """
    rows = tuple(range(-dims, 0))
    low = x.amin(rows, keepdim=True).clamp_max(0.0)
    high = x.amax(rows, keepdim=True).clamp_min(0.0)
    step = (high / STEPS - low / STEPS).clamp_min(SMALLEST_STEP)
    zero = torch.round(-low / step)
    return (torch.round(x / step) + zero).clamp(0, STEPS).sub(zero) * step


def register_patterns() -> None:
    """Make Inductor know the pattern: of itself it does until torch 2.13, and later ones leave that to torchao."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what these modules import
        own = importlib.import_module("torch._inductor.fx_passes.quantization")
        if not hasattr(own, REGISTER):
            importlib.import_module("torchao.quantization")  # registers operators that the patterns name
            getattr(importlib.import_module("torchao.quantization.pt2e.inductor_passes.x86"), REGISTER)()
    _keep_inputs()


def _keep_inputs() -> None:
    """Let no 8-bit linear layer write its sum with another value over that value where it is an input of the graph.

    Inductor (2.11 to 2.15) asks whether the value is a view, not whose memory it is: a call of `x + layer(norm(x))`
    overwrites its caller's x.
    """
    ir = importlib.import_module("torch._inductor.ir")
    fusion = importlib.import_module("torch._inductor.fx_passes.mkldnn_fusion")
    own = getattr(fusion, IN_PLACE, None)
    if own is None or hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def in_place(other: Any) -> bool:
        data = other.data
        while isinstance(data, ir.StorageBox | ir.BaseView):
            data = data.data
        return not isinstance(data, ir.InputBuffer) and own(other)

    setattr(fusion, IN_PLACE, in_place)


def observe_inputs(
    target: Target,
    kinds: tuple[type[nn.Module], ...],
    also: Callable[[nn.Module, torch.Tensor], None] = lambda layer, x: None,
) -> dict[nn.Module, tuple[float, int]]:
    """Scale and zero point of every layer's input over the workload's calibration calls; `also` sees them, too."""
    seen: dict[nn.Module, tuple[float, float]] = {}

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = layer_input(args, kwargs)
        if not x.numel():  # an expert to whom no row was sent
            return
        low, high = (end.item() for end in x.detach().float().aminmax())
        before = seen.get(module, (low, high))
        seen[module] = min(low, before[0]), max(high, before[1])
        also(module, x)

    layers = [module for module in target.model.modules() if isinstance(module, kinds)]
    handles = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            for case in target.workload.calibration(target.compute_dtype):
                target.model(*case.args, **case.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {module: activation_range(*ends) for module, ends in seen.items()}
