"""Recurrent layers in GGUF files: the order of their heads, and vectors that a file keeps in another form."""

from __future__ import annotations

import torch

from torchwright.hub.gguf.model import States

CONVOLUTIONS = (".conv1d.weight", ".conv.conv.weight")
VECTORS = (".D", ".dt_bias", ".mamba.norm.weight")
RATE, SHARED_GATE = ".A_log", ".shared_expert_gate.weight"


def value_heads(states: States, size: int) -> torch.Tensor | None:
    """Return the file's row for each of the model's, where the last ones belong to value heads.

    In a file head r of key head k is at (r, k), and in the model at (k, r). Each has one row, or one for each of its
    dimensions. None: there are fewer rows than heads.
    """
    each = states.head_dim if size >= states.heads * states.head_dim else 1
    values = states.heads * each
    if size < values:
        return None
    heads = torch.arange(states.heads).view(-1, states.key_heads).t().flatten()
    order = (heads[:, None] * each + torch.arange(each)).flatten()
    return torch.cat([torch.arange(size - values), size - values + order])


def by_key_head(states: States, size: int) -> torch.Tensor | None:
    """Return the file's row for each of the model's: queries, keys, values and gates, which it has by key head.

    None: there are more or fewer rows.
    """
    repeated = states.heads // states.key_heads * states.head_dim
    sizes = (states.key_dim, states.key_dim, repeated, repeated)
    if states.key_heads * sum(sizes) != size:
        return None
    parts, start = [], 0
    for size in sizes:
        parts.append(start + torch.arange(states.key_heads * size).view(states.key_heads, size))
        start += states.key_heads * size
    return torch.cat(parts, dim=1).flatten()


def in_the_model(name: str, stored: torch.Tensor) -> torch.Tensor | None:
    """Return a vector or a convolution as the model has it, and None for any other tensor.

    Files keep the rate of forgetting as -exp(A_log), and leave out or add extents of 1. A rate that is not below 0
    gives NaN.
    """
    if name.endswith(RATE):
        return (-stored.float()).log().flatten()
    if name.endswith(VECTORS):
        return stored.flatten()
    if name.endswith(CONVOLUTIONS):
        return stored.unsqueeze(1)
    return stored.view(1, -1) if name.endswith(SHARED_GATE) else None
