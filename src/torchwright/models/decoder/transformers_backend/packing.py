"""Packed linear layers in a model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchwright.core.errors import ModelError, first_line
from torchwright.core.scheme import BF16, Scheme
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.decoder.transformers_backend.experts import PackedExperts, has_experts

ROUTERS = ("gate", "router")
"""Names of layers that choose experts. They are never rounded: a small error sends a token to other experts."""
TRIED = 4
"""Tokens of the pass that shows that the model runs with packed layers."""


def pack_layers(model: Any, scheme: Scheme | None, dtype: torch.dtype, device: torch.device) -> int:
    """Replace a model's linear layers and experts by packed ones where the kernels take them; return how many.

    A model whose code reads a layer's weight cannot run with packed ones: it keeps its own, and with a `scheme`
    `ModelError` is raised.
    """
    if ops.on(device, dtype) is None:
        if scheme is None:
            return 0
        raise ModelError(f"quantization to {scheme}", found=f"no compiled kernels for {dtype} on {device}")
    layers = [(*place, kept) for place in _layers(model) if (kept := _scheme(place[1], scheme, dtype))]
    first = {(type(owner), name): (owner, name, layer, kept) for owner, name, layer, kept in reversed(layers)}
    fault = _refusal(model, list(first.values()), device)
    if fault is not None and scheme is not None:
        raise ModelError(
            f"{type(model).__name__} does not run with layers of {scheme}",
            found=fault,
            next="leave --quantize out",
        )
    if fault is not None:
        return 0
    packed = 0
    while layers:  # one after the other: a layer's own weights are let go before the next is packed
        owner, name, layer, kept = layers.pop()
        made = _packed(layer, kept, device)
        setattr(owner, name, made)
        if isinstance(made, PackedExperts):
            made.release()
        packed += sum(isinstance(part, PackedLinear) for part in made.modules())
    return packed


def _refusal(
    model: Any, layers: list[tuple[nn.Module, str, nn.Module, Scheme]], device: torch.device
) -> str | None:
    """Try one packed layer of each kind; return the fault, or None. The model's own layers are put back."""
    try:
        for owner, name, layer, kept in layers:
            setattr(owner, name, _packed(layer, kept, device))
        with torch.inference_mode():
            model(input_ids=torch.arange(TRIED, device=device)[None], use_cache=False)
    except Exception as error:  # whatever a model's own code raises
        return f"{type(error).__name__}: {first_line(error)}"
    finally:
        for owner, name, layer, _ in layers:
            setattr(owner, name, layer)
    return None


def _layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """The linear layers and experts of a model: the module that each hangs on, its name there, and itself."""
    return [
        (owner, name, layer)
        for owner in model.modules()
        for name, layer in owner.named_children()
        if type(layer) is nn.Linear or has_experts(layer)
    ]


def _packed(layer: Any, scheme: Scheme, device: torch.device) -> nn.Module:
    if has_experts(layer):
        return PackedExperts(layer, scheme, device)
    bias = None if layer.bias is None else layer.bias.detach()
    return PackedLinear(layer.weight.detach(), bias, scheme, device=device)


def _scheme(name: str, scheme: Scheme | None, dtype: torch.dtype) -> Scheme | None:
    """The scheme of one layer, None for one that stays as it is."""
    if scheme is not None and name not in ROUTERS:
        return scheme
    return None if dtype == torch.float32 else BF16
