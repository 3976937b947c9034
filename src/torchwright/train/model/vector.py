"""A vector that learns, as a module of its own."""

from __future__ import annotations

import torch
from torch import nn


class Vector(nn.Module):
    """Gives its parameter (N,); a layout divides it, or copies it, like a linear layer's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self) -> torch.Tensor:
        return self.weight
