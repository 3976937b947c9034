"""Attention sinks (OpenAI, gpt-oss): each head has a score of its own next to those of the keys in every softmax."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def softmax_beside(score_BKGQS: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the keys and a sink, without the sink's share."""
    K, G = score_BKGQS.shape[1:3]
    sink_KG11 = sinks_H.to(score_BKGQS.dtype).view(K, G, 1, 1)
    beside = torch.cat([score_BKGQS, sink_KG11.expand(*score_BKGQS.shape[:-1], 1)], dim=-1)
    return beside.softmax(-1)[..., :-1]


def sink_in_front(
    q_BHTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, scale: float, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values with one more of each in front, and with one more dimension.

    In that dimension queries have their head's sink over `scale`, the first key has 1 and others 0, so that its score
    is the sink. Its value is zero.
    """
    B, H, T, _ = q_BHTD.shape
    sink_BHT1 = (sinks_H.to(q_BHTD.dtype) / scale).view(1, H, 1, 1).expand(B, H, T, 1)
    q = F.pad(torch.cat([q_BHTD, sink_BHT1], dim=-1), (0, 0, 1, 0))
    first_D = k_BKTD.new_zeros(k_BKTD.shape[-1] + 1)
    first_D[-1] = 1
    k = torch.cat([first_D.expand(*k_BKTD.shape[:2], 1, -1), F.pad(k_BKTD, (0, 1))], dim=2)
    return q, k, F.pad(v_BKTD, (0, 1, 1, 0))
