"""Arithmetic of the decoder that serves and of the model that trains, so that both compute the same function."""

from __future__ import annotations

import torch

from torchwright.hardware.kernels import reference
from torchwright.models.decoder.config import DecoderConfig, ExpertsConfig


def route(
    score_TX: torch.Tensor, bias_X: torch.Tensor | None, experts: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return all experts' shares (T, X), each token's chosen experts (T, C) and their shares (T, C).

    Shares are the softmax or the sigmoid of the router's scores in float32 or better; a bias only chooses, and so do
    groups (DeepSeek-AI, 2024).
    """
    return reference.choose(score_TX, bias_X, *choice(experts))


def choice(experts: ExpertsConfig) -> tuple[int, bool, int, int, int]:
    """Return how experts are chosen, as the kernels take it: chosen, sigmoid, groups, chosen_groups, ranked."""
    return experts.chosen, experts.sigmoid, experts.groups, experts.chosen_groups, experts.ranked


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
