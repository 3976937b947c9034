"""A Moonshine of Torchwright's own encoder and decoder layers: three convolutions over the samples before them."""

from __future__ import annotations

import torch
from torch import nn

from torchwright.hardware.kernels import ops
from torchwright.hub.fields import Fields
from torchwright.models.speech.moonshine.weights import EPS, moonshine, refuse
from torchwright.models.speech.moonshine.windows import CONVOLUTIONS
from torchwright.models.speech.native_family import NativeFamily
from torchwright.models.speech.stem_parts import StemParts, frames


class Stem(nn.Module):
    """From samples (1, T) to what the encoder reads (S, E): three convolutions, the first one's output normalized."""

    def __init__(self, weights: StemParts, fields: Fields) -> None:
        super().__init__()
        E, kernels = weights.config.model, [kernel for kernel, _ in CONVOLUTIONS]
        self.conv1 = weights.convolution("conv1", E, 1, kernels[0])
        self.conv2 = weights.convolution("conv2", 2 * E, E, kernels[1])
        self.conv3 = weights.convolution("conv3", E, 2 * E, kernels[2])
        # One group: mean and deviation are those of the whole window.
        self.groupnorm = nn.GroupNorm(1, E, eps=EPS, device="meta").requires_grad_(False)
        kept = {name: weights.stem(f"groupnorm.{name}", E) for name in ("weight", "bias")}
        self.groupnorm.load_state_dict(kept, assign=True)
        self.dtype = weights.dtype

    def forward(self, samples_1T: torch.Tensor) -> torch.Tensor:
        (first, second, third), dtype = CONVOLUTIONS, self.dtype
        x_TE = self.conv1(frames(samples_1T[0, :, None].to(dtype), *first)).float().tanh()
        x_TE = self.groupnorm(x_TE.T[None])[0].T.to(dtype)
        x_TC = ops.activate(self.conv2(frames(x_TE, *second)), "gelu")
        wide_SE = ops.activate(self.conv3(frames(x_TC, *third)), "gelu").float()
        # The stream has no mean (`models/decoder/seq2seq/stack_weights.py`).
        return (wide_SE - wide_SE.mean(-1, keepdim=True)).to(dtype)


FAMILY = NativeFamily(stack=moonshine, stem=Stem, refuse=refuse)
