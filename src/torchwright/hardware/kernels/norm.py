"""LayerNorm and RMSNorm with gradients: each pass reads its tensors once and writes its result once.

PyTorch computes RMSNorm on a CPU operator by operator, and keeps each of their results for the backward pass. Here
backward reads the input and one or two numbers of a row (the formulas: Ba et al., 2016; Zhang and Sennrich, 2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchwright.hardware.kernels import ops


def rms_norm(x: torch.Tensor, weight_E: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, computed in float32 or better, in x's dtype."""
    if _in_one_sweep(x, weight_E):
        return _Norm.apply(x, _single(weight_E), None, eps, False)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight_E = None if weight_E is None else weight_E.to(wide)
    return F.rms_norm(x.to(wide), x.shape[-1:], weight_E, eps).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight_E: torch.Tensor | None, bias_E: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias over the last axis, in x's dtype, as `F.layer_norm`.

    Only bfloat16 takes the kernels: PyTorch's own is as fast in float32.
    """
    fast = x.dtype == torch.bfloat16 and _in_one_sweep(x, weight_E, bias_E)
    if fast and (weight_E is not None or bias_E is None):
        return _Norm.apply(x, _single(weight_E), _single(bias_E), eps, True)
    return F.layer_norm(x, x.shape[-1:], weight_E, bias_E, eps)


class LayerNorm(nn.LayerNorm):
    """PyTorch's layer, by `layer_norm` if it normalizes over the last axis alone."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if len(self.normalized_shape) != 1:
            return super().forward(input)
        return layer_norm(input, self.weight, self.bias, self.eps)


def use_layer_norm(model: nn.Module) -> None:
    """Turn each `nn.LayerNorm` of a model, but no subclass, into `LayerNorm`, in place."""
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = LayerNorm


def _in_one_sweep(*tensors: torch.Tensor | None) -> bool:
    """Check whether the kernels take these, x first: plain tensors on a CPU, and no compiler that would fuse norms.

    On a GPU PyTorch's own norms are one operator.
    """
    x = tensors[0]
    assert x is not None
    plain = all(one is None or type(one) in (torch.Tensor, torch.nn.Parameter) for one in tensors)
    return plain and x.device.type == "cpu" and not torch.compiler.is_compiling() and ops.fast(x)


def _single(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.to(torch.float32).contiguous()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_E: torch.Tensor | None,
        bias_E: torch.Tensor | None,
        eps: float,
        centered: bool,
    ) -> torch.Tensor:
        out, mean, inverse = ops.on(x.device, x.dtype).norm(x, weight_E, bias_E, eps, centered)
        ctx.save_for_backward(x, mean, inverse, weight_E)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, mean, inverse, weight_E = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        found = ops.on(x.device, x.dtype).norm_backward(grad, x, mean, inverse, weight_E, wanted)
        return *(one if asked else None for one, asked in zip(found, wanted, strict=True)), None, None
