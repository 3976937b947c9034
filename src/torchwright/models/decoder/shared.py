"""Arithmetic of the decoder that serves and of the model that trains, so that both compute the same function."""

from __future__ import annotations

import torch

from torchwright.models.decoder.config import DecoderConfig, ExpertsConfig


def route(
    score_TX: torch.Tensor, bias_X: torch.Tensor | None, experts: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return all experts' shares (T, X), each token's chosen experts (T, C) and their shares (T, C).

    Shares are the softmax or the sigmoid of the router's scores in float32 or better; a bias only chooses, and so do
    groups (DeepSeek-AI, 2024).
    """
    wide, chosen = torch.promote_types(score_TX.dtype, torch.float32), experts.chosen
    share_TX = score_TX.to(wide).sigmoid() if experts.sigmoid else score_TX.softmax(-1, dtype=wide)
    rank_TX = share_TX if bias_X is None else share_TX + bias_X
    if experts.chosen_groups < experts.groups:
        rank_TGM = rank_TX.unflatten(-1, (experts.groups, -1))
        group_TG = rank_TGM.topk(experts.ranked, dim=-1).values.sum(-1)
        kept_TG = group_TG.topk(experts.chosen_groups, dim=-1).indices
        hidden_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
        rank_TX = rank_TGM.masked_fill(hidden_TG[..., None], -torch.inf).flatten(-2)
    expert_TC = rank_TX.topk(chosen, dim=-1).indices
    return share_TX, expert_TC, share_TX.gather(-1, expert_TC)


def halves(x: torch.Tensor) -> torch.Tensor:
    """Return dimensions that turn in adjacent pairs with the first of each pair first."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def shape_logits(config: DecoderConfig, logits: torch.Tensor) -> torch.Tensor:
    """Scale and cap the output layer's numbers."""
    if config.logit_scale != 1:
        logits = logits * config.logit_scale
    if config.logit_soft_cap:
        logits = torch.tanh(logits / config.logit_soft_cap) * config.logit_soft_cap
    return logits
