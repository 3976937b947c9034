"""Low-rank adapters on frozen matrices: LoRA (Hu et al., 2021), QLoRA (Dettmers et al., 2023), DoRA (Liu et al.,
2024).

    W x  becomes  W x + s · B (A x)        s = alpha / r; A (r, K) random, B (N, r) zero, so that training begins at W
    with DoRA     m / ‖W + s · B A‖ · (W x + s · B (A x))        one norm a row, taken as a constant; m begins at ‖W‖

An adapter hangs on its layer by a forward hook: the layer's own code, names and kind stay what they were. If a plain
linear layer adds only the adapter's two products, `AdaptedLinear` computes layer and adapter in one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import ModelError
from torchwright.core.layer_types import computes_as
from torchwright.train.model.fill import fill, named_tensors, whole
from torchwright.train.model.four_bit import BLOCK, FourBit, FourBitLinear, FourBits

NAME = "lora"
"""The name of an adapter within its layer."""


class Adapter(nn.Module):
    """The adapter of one layer."""

    square_N: torch.Tensor
    """DoRA: ‖W‖² of each row of the frozen weight."""

    def __init__(self, layer: nn.Module, *, r: int, alpha: float, dropout: float, dora: bool) -> None:
        super().__init__()
        K, N = sides(layer)
        self.scale = alpha / r
        self.A, self.B = nn.Parameter(torch.empty(r, K)), nn.Parameter(torch.empty(N, r))
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.magnitude: nn.Parameter | None = None
        if dora:
            self.magnitude = nn.Parameter(torch.empty(N))
            self.register_buffer("square_N", torch.empty(N))

    def applied(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        """The layer's output with what the adapter adds (a forward hook)."""
        x = inputs[0] if self.dropout is None else self.dropout(inputs[0])
        # The scale goes to the narrow tensor.
        delta = F.linear(F.linear(x, self.A.to(_dtype(x))) * self.scale, self.B.to(_dtype(x)))
        if self.magnitude is None:
            return out + delta
        bias: Any = layer.bias
        factor_N = (self.magnitude / self.norm(layer)).to(out.dtype)
        if bias is None:
            return factor_N * (out + delta)
        return factor_N * (out - bias + delta) + bias

    @torch.no_grad()
    def norm(self, layer: nn.Module) -> torch.Tensor:
        """‖W + s · B A‖ of each row, without that matrix: ‖W‖² + 2 s (W Aᵀ)·B + s² (B (A Aᵀ))·B."""
        wide = torch.promote_types(self.A.dtype, torch.float32)
        A, B, s = self.A.to(wide), self.B.to(wide), self.scale
        across_N = (product(layer, self.A).T.to(wide) * B).sum(1)
        own_N = (B @ (A @ A.T) * B).sum(1)
        return (self.square_N + 2 * s * across_N + s * s * own_N).clamp_min(0).sqrt()

    def adapted(self, layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        """The layer's output with what the adapter adds, in place of the layer's own forward."""
        dtype = _dtype(input)
        weight, bias = layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype)
        return AdaptedLinear.apply(
            input.to(dtype), weight, bias, self.A.to(dtype), self.B.to(dtype), self.scale
        )  # type: ignore[return-value]


class AdaptedLinear(torch.autograd.Function):
    """x Wᵀ + b + s · (x Aᵀ) Bᵀ with W and b frozen: what is added goes into the sums of a product, not through memory.

    By itself autograd adds two outputs, and two gradients of x, for each layer, each as large as an activation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        A: torch.Tensor,
        B: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        hidden_MR = F.linear(x_MK, A) * scale
        ctx.save_for_backward(x_MK, hidden_MR, weight_NK, A, B)
        ctx.scale, ctx.shape = scale, x.shape
        out_MN = torch.addmm(F.linear(x_MK, weight_NK, bias_N), hidden_MR, B.T)
        return out_MN.view(*x.shape[:-1], out_MN.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MK, hidden_MR, weight_NK, A, B = ctx.saved_tensors
        gradient_MN = gradients[0].reshape(-1, gradients[0].shape[-1])
        to_hidden_MR = (gradient_MN @ B) * ctx.scale
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = torch.addmm(gradient_MN @ weight_NK, to_hidden_MR, A).view(ctx.shape)
        return to_x, None, None, to_hidden_MR.T @ x_MK, gradient_MN.T @ hidden_MR, None


def _dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of a product with `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def sides(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a layer: linear, or GPT-2's `Conv1D`, whose weight is (inputs, outputs)."""
    if isinstance(layer, nn.Linear | FourBitLinear):
        return layer.in_features, layer.out_features
    weight: Any = layer.weight
    return tuple(weight.shape)


def product(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x · Wᵀ by the layer's weight, without its bias."""
    if isinstance(layer, FourBitLinear):
        return layer.product(x)
    weight: Any = layer.weight
    x = x.to(weight.dtype)
    return F.linear(x, weight) if isinstance(layer, nn.Linear) else x @ weight


def freeze(
    model: nn.Module, dtype: torch.dtype, four_bits: FourBits | None = None, linears: Iterable[str] = ()
) -> None:
    """Freeze every parameter and store it in `dtype`, or in four bits if it is a matrix of `linears`.

    Buffers keep their type: angles of rotary embeddings, and biases by which experts are chosen. Raises `ModelError`
    for a matrix whose rows are not a multiple of the block size.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    if four_bits is None:
        return
    for name in linears:
        linear = model.get_submodule(name)
        if not computes_as(linear, (nn.Linear,)) or linear.in_features % BLOCK:
            raise ModelError(
                f"'{four_bits}' keeps rows of matrices in blocks of {BLOCK} weights",
                found=f"{name} is {type(linear).__name__} with {sides(linear)[0]} inputs",
                next='set lora.base = "bf16"',
            )
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, FourBitLinear(linear, four_bits))


def add_adapters(model: nn.Module, names: Iterable[str], **options: Any) -> None:
    """Hang an adapter (`Adapter`'s options) on each of the layers; they are empty until `reset_adapters`."""
    for name in names:
        layer: Any = model.get_submodule(name)
        adapter = Adapter(layer, **options)
        layer.add_module(NAME, adapter)
        if computes_as(layer, (nn.Linear,)) and adapter.magnitude is None and adapter.dropout is None:
            layer.forward = partial(adapter.adapted, layer)
        else:
            layer.register_forward_hook(adapter.applied)


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """Layer → its adapter."""
    return {
        name.removesuffix(f".{NAME}"): module
        for name, module in model.named_modules()
        if isinstance(module, Adapter)
    }


@torch.no_grad()
def reset_adapters(model: nn.Module, seed: int) -> None:
    """Values that depend on the seed, the layer's name and its weight alone: A is uniform within ±1/√K, B is zero.

    To be called with the frozen weights in place; they may be sharded.
    """
    for name, adapter in adapters(model).items():
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        bound = 1 / math.sqrt(adapter.A.shape[1])
        fill(adapter.A, torch.empty(adapter.A.shape).uniform_(-bound, bound, generator=generator))
        nn.init.zeros_(adapter.B)
        if adapter.magnitude is not None:
            weight_NK = frozen_weight(model.get_submodule(name))
            adapter.square_N.copy_(weight_NK.to(adapter.square_N.dtype).square().sum(1))
            fill(adapter.magnitude, adapter.square_N.sqrt())


def frozen_weight(layer: nn.Module) -> torch.Tensor:
    """A layer's own weight (N, K), whole; where it is sharded every process asks."""
    weight: Any = layer.weight
    if isinstance(weight, FourBit):
        return weight.values(weight.dtype)
    full = whole(weight.detach())
    return full if isinstance(layer, nn.Linear) else full.T


@torch.no_grad()
def merged_weight(layer: nn.Module) -> torch.Tensor:
    """The weight (N, K) that computes what the layer and its adapter do, rounded once to the frozen weight's type."""
    weight = frozen_weight(layer)
    adapter = getattr(layer, NAME, None)
    if not isinstance(adapter, Adapter):
        return weight
    A, B = whole(adapter.A.detach()), whole(adapter.B.detach())
    wide = torch.promote_types(A.dtype, torch.float32)
    full = weight.to(wide) + adapter.scale * (B.to(wide) @ A.to(wide))
    if adapter.magnitude is not None:
        full *= (whole(adapter.magnitude.detach()) / full.norm(dim=1))[:, None]
    return full.to(weight.dtype)


def merged(model: nn.Module) -> Callable[[str], torch.Tensor]:
    """Parameter name → its whole value with the adapters in it, for `save_folder`."""
    tensors = named_tensors(model)

    def value(name: str) -> torch.Tensor:
        layer = model.get_submodule(name.rpartition(".")[0])
        if name.endswith(".weight") and isinstance(layer, nn.Linear | FourBitLinear):
            return merged_weight(layer)
        return whole(tensors[name].detach())

    return value
