"""A Whisper of Torchwright's own encoder and decoder layers: two convolutions and learned positions before them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.hardware.kernels import ops
from torchwright.hub.fields import Fields
from torchwright.models.decoder.seq2seq.stacks import BART_LINEAR, BART_NORM, StackFamily, bart
from torchwright.models.speech.native_family import NativeFamily
from torchwright.models.speech.stem_parts import StemParts, frames

WHISPER = StackFamily(
    read=bart(
        "WhisperForConditionalGeneration",
        post_norm=False,
        context={"encoder": "max_source_positions", "decoder": "max_target_positions"},
        scaled=False,
    ),
    norms="layer",
    biased=True,
    unbiased=frozenset({"self_attn.k_proj", "encoder_attn.k_proj"}),
    norm=BART_NORM,
    linear=BART_LINEAR,
    positions="embed_positions.weight",
    head="proj_out.weight",
)


KERNEL = 3
"""Frames that each convolution takes, one before and one behind the place that it is for."""


class Stem(nn.Module):
    """From features (1, M, frames) to what the encoder reads (frames / 2, E): two convolutions and the positions."""

    positions: torch.Tensor

    def __init__(self, weights: StemParts, fields: Fields) -> None:
        super().__init__()
        E = weights.config.model
        self.conv1 = weights.convolution("conv1", E, fields.integer("num_mel_bins", 80), KERNEL)
        self.conv2 = weights.convolution("conv2", E, E, KERNEL)
        self.register_buffer("positions", weights.positions())

    def forward(self, features_1MF: torch.Tensor) -> torch.Tensor:
        x_FM = features_1MF[0].T.to(self.positions.dtype)
        x_FE = ops.activate(self.conv1(_padded_frames(x_FM, 1)), "gelu")
        x_SE = ops.activate(self.conv2(_padded_frames(x_FE, 2)), "gelu")
        wide_SE = x_SE.float()
        # The stream has no mean (`models/decoder/seq2seq/stack_weights.py`); neither have the positions.
        return (wide_SE - wide_SE.mean(-1, keepdim=True) + self.positions).to(x_SE.dtype)


def _padded_frames(x_TC: torch.Tensor, stride: int) -> torch.Tensor:
    """Every `stride`-th frame between its neighbours, a row of 3 · C each; zeros lie around the sound."""
    return frames(F.pad(x_TC, (0, 0, 1, 1)), KERNEL, stride)


FAMILY = NativeFamily(stack=lambda fields, side: WHISPER, stem=Stem)
