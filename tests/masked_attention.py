"""Attention whose mask may leave a query nothing to see."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Of a mask that says which keys each query sees, as truth or as numbers to add."""

    def __init__(self, heads: int, scale: float | None, added: bool) -> None:
        super().__init__()
        self.joined, self.out, self.heads = nn.Linear(16, 48), nn.Linear(16, 16), heads
        self.scale, self.added = scale, added

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        joined = self.joined(x).view(rows, length, 3, self.heads, -1)
        query, key, value = (each.transpose(1, 2) for each in joined.unbind(2))
        if self.added:
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        found = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        return self.out(found.transpose(1, 2).reshape(rows, length, 16))


def causal(padding: int = 0) -> torch.Tensor:
    """(4, 1, 8, 8): each query sees what was before it. The second row begins with `padding` keys that nobody sees, so
    that as many queries see none."""
    mask = torch.ones(4, 1, 8, 8, dtype=torch.bool).tril()
    mask[1, :, :, :padding] = False
    return mask
