"""Arithmetic of the decoder that serves and of the model that trains, so that both compute the same function."""

from __future__ import annotations

import torch

from torchwright.models.decoder.config import DecoderConfig


def route(
    score_TX: torch.Tensor, bias_X: torch.Tensor | None, chosen: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return all experts' shares (T, X), each token's chosen experts (T, C) and their shares (T, C).

    Shares are the softmax of the router's scores in float32 or better; a bias only chooses.
    """
    share_TX = score_TX.softmax(-1, dtype=torch.promote_types(score_TX.dtype, torch.float32))
    rank_TX = share_TX if bias_X is None else share_TX + bias_X
    expert_TC = rank_TX.topk(chosen, dim=-1).indices
    return share_TX, expert_TC, share_TX.gather(-1, expert_TC)


def shape_logits(config: DecoderConfig, logits: torch.Tensor) -> torch.Tensor:
    """Scale and cap the output layer's numbers."""
    if config.logit_scale != 1:
        logits = logits * config.logit_scale
    if config.logit_soft_cap:
        logits = torch.tanh(logits / config.logit_soft_cap) * config.logit_soft_cap
    return logits
