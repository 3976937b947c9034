"""A Whisper of Torchwright's own encoder and decoder layers, from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.decoder.config import DecoderConfig
from torchwright.decoder.encoder import Encoder
from torchwright.decoder.load import linear_maker
from torchwright.decoder.model import Decoder
from torchwright.decoder.precision import Precision
from torchwright.decoder.stacks import SIDES
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.kernels import ops
from torchwright.kernels.cpu import build
from torchwright.kernels.limits import LANES
from torchwright.speech.native import NativeSpeech
from torchwright.speech.whisper.weights import WHISPER, WhisperParts, stack_config

CPU = torch.device("cpu")


class StemParts(Protocol):
    """What a `Stem` is built from."""

    config: DecoderConfig

    def convolution(self, name: str, channels: int) -> nn.Module: ...
    def positions(self) -> torch.Tensor | None: ...


class Stem(nn.Module):
    """From features (1, M, frames) to what the encoder reads (frames / 2, E): two convolutions and the positions."""

    positions: torch.Tensor

    def __init__(self, weights: StemParts, bands: int) -> None:
        super().__init__()
        self.conv1 = weights.convolution("conv1", bands)
        self.conv2 = weights.convolution("conv2", weights.config.model)
        self.register_buffer("positions", weights.positions())

    def forward(self, features_1MF: torch.Tensor) -> torch.Tensor:
        x_FM = features_1MF[0].T.to(self.positions.dtype)
        x_FE = ops.activate(self.conv1(_windows(x_FM, 1)), "gelu")
        x_SE = ops.activate(self.conv2(_windows(x_FE, 2)), "gelu")
        wide_SE = x_SE.float()
        # The stream has no mean (`decoder/stack_weights.py`); neither have the positions.
        return (wide_SE - wide_SE.mean(-1, keepdim=True) + self.positions).to(x_SE.dtype)


def _windows(x_TC: torch.Tensor, stride: int) -> torch.Tensor:
    """Every `stride`-th frame between its neighbours, a row of 3 · C each; zeros lie around the sound."""
    padded = F.pad(x_TC, (0, 0, 1, 1)).contiguous()
    T, C = x_TC.shape
    return padded.as_strided((-(-T // stride), 3 * C), (stride * C, 1))


def native_fault(folder: Path) -> str | None:
    """Why our kernels do not run this Whisper here, or None."""
    if fault := build.load_fault():
        return f"no kernels: {fault}"
    fields = Fields(folder / "config.json", read_config(folder))
    sizes = {stack_config(fields, side).head_dim for side in ("encoder", "decoder")}
    odd = [size for size in sizes if size % LANES]
    return f"heads of {odd[0]} dimensions; multiples of {LANES} are wanted" if odd else None


def load_native(folder: Path, dtype: torch.dtype, precision: Precision) -> NativeSpeech:
    """The Whisper of a folder; raises `ModelError`, naming the file, for what cannot be used."""
    described = read_config(folder)
    fields = Fields(folder / "config.json", described)
    checkpoint = Checkpoint(folder, described)
    made = {side: linear_maker(scheme, dtype, CPU) for side, scheme in precision.schemes.items()}
    parts = {side: WhisperParts(WHISPER, fields, side, checkpoint, dtype, made[side]) for side in SIDES}
    stem_parts = WhisperParts(WHISPER, fields, "encoder", checkpoint, dtype, linear_maker(None, dtype, CPU))
    return assembled(parts | {"stem": stem_parts}, fields, precision.describe(dtype))


def assembled(parts: dict[str, Any], fields: Fields, description: str) -> NativeSpeech:
    """The model of its parts: those of encoder and decoder, and those of the stem where they come from elsewhere."""
    stem = Stem(parts.get("stem", parts["encoder"]), fields.integer("num_mel_bins", 80)).eval()
    encoder = Encoder(parts["encoder"].config, parts["encoder"]).eval()
    decoder = Decoder(parts["decoder"].config, parts["decoder"]).eval()
    return NativeSpeech(stem, encoder, decoder, description)
