"""Causal attention over whole sequences: what a layer needs to know, and two ways to compute it.

A model's attention function is exchangeable (`Transformer.use_attention`): which one is fastest depends on the device
and on torch.compile, and context parallelism puts another around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from torchwright.train.model.sinks import sink_in_front, softmax_beside


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The rules for a layer's attention scores."""

    scale: float
    window: int
    """0 is full attention, else how many last tokens a query sees, itself included."""
    soft_cap: float
    """0 disables it; otherwise scores become tanh(score / soft_cap) · soft_cap."""
    sinks_H: torch.Tensor | None = None
    """Each query head's score next to those of the keys, to which no value belongs (gpt-oss)."""

    def beside(self, sinks_H: torch.Tensor) -> Scores:
        """Return these rules with sinks."""
        return replace(self, sinks_H=sinks_H)


BLOCK, MOST_BLOCKS = 128, 16
"""Queries of a block of `explicit_attention` at least, and blocks of a sequence at most."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scores, torch.Tensor | None], torch.Tensor]
"""From queries (B, H, T, D), keys and values (B, K, T, D) to (B, H, T, D); causal, H a multiple of K.

The last argument, where there is one, says of each token of the whole rows (B, S) where its document begins: no query
sees what lies before its own.
"""


def fused_attention(
    q_BHTD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    scores: Scores,
    documents_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """PyTorch's fused operator; soft caps, which it does not know, are computed explicitly.

    A sink is a key in front of all others; a query in front of all others keeps the rest causal.
    """
    if scores.soft_cap:
        return explicit_attention(q_BHTD, k_BKTD, v_BKTD, scores, documents_BT)
    T, mask = q_BHTD.shape[2], None
    if 0 < scores.window < T or documents_BT is not None:
        places_T = torch.arange(T, device=q_BHTD.device)
        mask = visible(places_T, places_T, scores.window, documents_BT)
        mask = mask if mask.ndim == 2 else mask[:, None]
    before = 0
    if scores.sinks_H is not None:
        before = 1
        q_BHTD, k_BKTD, v_BKTD = sink_in_front(q_BHTD, k_BKTD, v_BKTD, scores.scale, scores.sinks_H)
        if mask is not None:
            mask = F.pad(F.pad(mask, (1, 0), value=True), (0, 0, 1, 0), value=True)
    out_BHTD = F.scaled_dot_product_attention(
        q_BHTD,
        k_BKTD,
        v_BKTD,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scores.scale,
        enable_gqa=q_BHTD.shape[1] != k_BKTD.shape[1],
    )
    return out_BHTD[:, :, before:, : out_BHTD.shape[-1] - before]


def explicit_attention(
    q_BHTD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    scores: Scores,
    documents_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores, softmax and weighted sum as operators of their own; softmax in float32 or better inside.

    Queries go in blocks, each with the keys that any of its queries sees. On a CPU the passes over scores take longer
    than the products, so that there are few of them: queries are scaled instead, and the mask is added in place.
    """
    (H, T), K = q_BHTD.shape[1:3], k_BKTD.shape[1]
    q_BKGTD = (q_BHTD * scores.scale).unflatten(1, (K, H // K))
    positions = torch.arange(T, device=q_BHTD.device)
    block = max(BLOCK, -(-T // MOST_BLOCKS))
    parts = []
    for begin in range(0, T, block):
        end = min(begin + block, T)
        first = max(0, begin + 1 - scores.window) if scores.window else 0
        # The queries of one key head are rows of one matrix: nothing is repeated for them.
        q_BKRD = q_BKGTD[:, :, :, begin:end].flatten(2, 3)
        score_BKRS = q_BKRD @ k_BKTD[:, :, first:end].transpose(-1, -2)
        if scores.soft_cap:
            score_BKRS = torch.tanh(score_BKRS / scores.soft_cap) * scores.soft_cap
        documents_BQ = None if documents_BT is None else documents_BT[:, begin:end]
        seen = visible(positions[begin:end], positions[first:end], scores.window, documents_BQ)
        mask = torch.zeros_like(seen, dtype=score_BKRS.dtype).masked_fill_(~seen, float("-inf"))
        if mask.ndim == 3:
            mask = mask[:, None, None]
        score_BKGQS = score_BKRS.unflatten(2, (H // K, -1)).add_(mask)
        if scores.sinks_H is None:
            weight_BKRS = score_BKGQS.softmax(-1).flatten(2, 3)
        else:
            weight_BKRS = softmax_beside(score_BKGQS, scores.sinks_H).flatten(2, 3)
        parts.append((weight_BKRS @ v_BKTD[:, :, first:end]).unflatten(2, (H // K, -1)))
    return torch.cat(parts, 3).flatten(1, 2)


def visible(
    query_Q: torch.Tensor, key_S: torch.Tensor, window: int, documents_BQ: torch.Tensor | None = None
) -> torch.Tensor:
    """(Q, S), or (B, Q, S) with the places at which the queries' documents begin: whether a query sees a key.

    `query_Q` and `key_S` are places in the row.
    """
    distance_QS = query_Q[:, None] - key_S
    seen_QS = distance_QS >= 0
    if window:
        seen_QS &= distance_QS < window
    return seen_QS if documents_BQ is None else seen_QS & (key_S >= documents_BQ[..., None])


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
