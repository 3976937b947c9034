"""A decoder that tells classes: a linear layer on the hidden state of a text's last token, as transformers has it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.model.fill import DEVIATION, fill
from torchwright.train.model.transformer import SCORE, Transformer


def classifier(config: DecoderConfig, classes: int) -> Transformer:
    """A `Transformer` whose logits (B, T, C) are of classes, on the default device."""
    model = Transformer(replace(config, tied=False, logit_scale=1.0, logit_soft_cap=0.0))
    model.head, model.output = nn.Linear(config.model, classes, bias=False), SCORE
    return model


@torch.no_grad()
def reset_scores(model: Transformer, seed: int) -> None:
    """Random weights of the output layer, the same however it is sharded."""
    generator = torch.Generator().manual_seed(seed)
    fill(model.head.weight, torch.empty(model.head.weight.shape).normal_(std=DEVIATION, generator=generator))
