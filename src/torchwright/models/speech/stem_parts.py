"""The stem of a speech model's encoder: convolutions over frames, as linear layers of several frames each."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.seq2seq.stack_weights import StackParts


class StemParts(Protocol):
    """The source of a stem's layers and tensors."""

    config: DecoderConfig
    dtype: torch.dtype
    """The dtype of the encoder's input."""

    def positions(self) -> torch.Tensor | None: ...

    def convolution(self, name: str, rows: int, channels: int, kernel: int) -> nn.Module:
        """From `kernel` frames of so many channels, one after another, to `rows` channels."""
        ...

    def stem(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor that does not belong to a linear layer."""
        ...


class SpeechStack(StackParts):
    """One stack's parts, and those of the stem."""

    def convolution(self, name: str, rows: int, channels: int, kernel: int) -> nn.Module:
        weight_NCL = self._tensor(f"{name}.weight", rows, channels, kernel)
        biased = f"{self._at}{name}.bias" in self._names
        bias_N = self._tensor(f"{name}.bias", rows) if biased else None
        return self._make_linear(weight_NCL.transpose(1, 2).flatten(1), bias_N)

    def stem(self, name: str, *shape: int) -> torch.Tensor:
        return self._tensor(name, *shape)


def frames(x_TC: torch.Tensor, kernel: int, stride: int) -> torch.Tensor:
    """Every `stride`-th run of `kernel` frames as one row: (1 + (T − kernel) // stride, kernel · C), a view."""
    x_TC = x_TC.contiguous()
    T, C = x_TC.shape
    return x_TC.as_strided((1 + (T - kernel) // stride, kernel * C), (stride * C, 1))
