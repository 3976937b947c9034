"""Packed linear layers in a model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchwright.core.errors import ModelError, first_line
from torchwright.core.scheme import BF16, Scheme
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.linear import PackedLinear

ROUTERS = ("gate", "router")
"""Names of layers that choose experts. They are never rounded: a small error sends a token to other experts."""
TRIED = 4
"""Tokens of the pass that shows that the model runs with packed layers."""


def pack_linears(model: Any, scheme: Scheme | None, dtype: torch.dtype, device: torch.device) -> int:
    """Replace a model's linear layers by packed ones where the kernels take them; return how many.

    A model whose code reads a layer's weight cannot run with packed ones: it keeps its own, and with a `scheme`
    `ModelError` is raised.
    """
    if ops.on(device, dtype) is None:
        if scheme is None:
            return 0
        raise ModelError(f"quantization to {scheme}", found=f"no compiled kernels for {dtype} on {device}")
    places = [
        (owner, name, linear, kept)
        for owner, name, linear in _linears(model)
        if (kept := _scheme(name, scheme, dtype)) is not None
    ]
    for owner, name, linear, kept in places:
        bias = None if linear.bias is None else linear.bias.detach()
        setattr(owner, name, PackedLinear(linear.weight.detach(), bias, kept, device=device))
    try:
        with torch.inference_mode():
            model(input_ids=torch.arange(TRIED, device=device)[None], use_cache=False)
    except Exception as error:  # whatever a model's own code raises
        for owner, name, linear, _ in places:
            setattr(owner, name, linear)
        if scheme is not None:
            raise ModelError(
                f"{type(model).__name__} does not run with layers of {scheme}",
                found=f"{type(error).__name__}: {first_line(error)}",
                next="leave --quantize out",
            ) from error
        return 0
    return len(places)


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers: the module that each hangs on, its name there, and itself."""
    return [
        (owner, name, module)
        for owner in model.modules()
        for name, module in owner.named_children()
        if type(module) is nn.Linear
    ]


def _scheme(name: str, scheme: Scheme | None, dtype: torch.dtype) -> Scheme | None:
    """The scheme of one layer, None for one that stays as it is."""
    if scheme is not None and name not in ROUTERS:
        return scheme
    return None if dtype == torch.float32 else BF16
