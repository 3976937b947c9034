"""Rotary position embeddings of training: the decoder's frequencies, turned by a batch's positions."""

from __future__ import annotations

import torch
from torch import nn

from torchwright.models.decoder.rope import BY_LENGTH, ROPES, Rope


class Rotary(nn.Module):
    """Cosines and sines of one embedding.

    Angles are float32 whatever the model's dtype, as in the decoder: another precision is another rotation.
    """

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, positions: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (…, R/2) in float32 of positions (…) in sequences of `length` tokens in all."""
        lengths = torch.full((1,), length, device=positions.device)
        inverse = ROPES[self.rope.kind](self.rope, lengths)
        if self.rope.kind in BY_LENGTH:
            inverse = inverse[0]
        angle = positions[..., None].float() * inverse
        return angle.cos() * self.rope.attention_factor, angle.sin() * self.rope.attention_factor


def rotate(x_BTHD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first R dimensions of each head turned, the first half of them with the second."""
    half = cos.shape[-1]
    cos, sin = (part[..., None, :].to(x_BTHD.dtype) for part in (cos, sin))
    first, second, rest = x_BTHD.split([half, half, x_BTHD.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
