"""Causal attention over whole sequences: what a layer needs to know, and two ways to compute it.

A model's attention function is exchangeable (`Transformer.use_attention`): which one is fastest depends on the device
and on torch.compile, and context parallelism puts another around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How a layer's attention scores come about."""

    scale: float
    window: int
    """0 is full attention, else how many last tokens a query sees, itself included."""
    soft_cap: float
    """0 is none, else scores become tanh(score / soft_cap) · soft_cap."""


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scores], torch.Tensor]
"""From queries (B, H, T, D), keys and values (B, K, T, D) to (B, H, T, D); causal, H a multiple of K."""


def fused_attention(
    q_BHTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """PyTorch's fused operator; soft caps, which it does not know, are computed explicitly."""
    if scores.soft_cap:
        return explicit_attention(q_BHTD, k_BKTD, v_BKTD, scores)
    T = q_BHTD.shape[2]
    windowed = 0 < scores.window < T
    positions = torch.arange(T, device=q_BHTD.device) if windowed else None
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BKTD,
        v_BKTD,
        attn_mask=None if positions is None else visible(positions, positions, scores.window),
        is_causal=positions is None,
        scale=scores.scale,
        enable_gqa=q_BHTD.shape[1] != k_BKTD.shape[1],
    )


def explicit_attention(
    q_BHTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Scores, softmax and weighted sum as operators of their own; softmax in float32 or better."""
    positions = torch.arange(q_BHTD.shape[2], device=q_BHTD.device)
    hidden_TT = ~visible(positions, positions, scores.window)
    score = masked_scores(q_BHTD, k_BKTD, hidden_TT, scores)
    weight = score.softmax(-1, dtype=torch.promote_types(score.dtype, torch.float32)).to(v_BKTD.dtype)
    return (weight @ v_BKTD[:, :, None]).flatten(1, 2)


def visible(query_Q: torch.Tensor, key_S: torch.Tensor, window: int) -> torch.Tensor:
    """(Q, S): whether the query at a position sees the key at another."""
    distance_QS = query_Q[:, None] - key_S
    seen_QS = distance_QS >= 0
    return seen_QS & (distance_QS < window) if window else seen_QS


def masked_scores(
    q_BHQD: torch.Tensor, k_BKSD: torch.Tensor, hidden_QS: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """(B, K, H/K, Q, S): scaled, capped, and −∞ where hidden."""
    B, H, Q, D = q_BHQD.shape
    K = k_BKSD.shape[1]
    score = q_BHQD.reshape(B, K, H // K, Q, D) @ k_BKSD[:, :, None].transpose(-1, -2) * scores.scale
    if scores.soft_cap:
        score = torch.tanh(score / scores.soft_cap) * scores.soft_cap
    return score.masked_fill(hidden_QS, float("-inf"))
