"""Layers in half precision one by one, whose share of a model's error can be measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The layer types that are cast individually."""


class Lower(nn.Module):
    """Computes a layer under torch.autocast, with its output in float32."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._forward = lower(layer, dtype)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._forward(*args, **kwargs)


def lower(layer: nn.Module, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """The layer's own forward under torch.autocast, in float32; nothing that is attached to the layer is called."""
    forward, device = layer.forward, next(layer.parameters()).device.type

    def lowered(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.autocast(device, dtype=dtype):
            return forward(*args, **kwargs).float()

    return lowered
