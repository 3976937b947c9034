"""The differences between families of speech models that are built from Torchwright's own layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.limits import LANES
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_config
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.load import linear_maker
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.precision import Precision
from torchwright.models.decoder.seq2seq.encoder import Encoder
from torchwright.models.decoder.seq2seq.stacks import SIDES, Side, StackFamily
from torchwright.models.speech.native import NativeSpeech
from torchwright.models.speech.stem_parts import SpeechStack, StemParts

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class NativeFamily:
    """One family: its two stacks, and what stands before the encoder."""

    stack: Callable[[Fields, Side], StackFamily]
    """Raises `ModelError` for a config.json that no such model has."""
    stem: Callable[[StemParts, Fields], nn.Module]
    """From a window's input (1, …) to what the encoder takes (S, E)."""
    refuse: Callable[[Fields], str | None] = lambda fields: None
    """Return the part of a valid configuration that our layers do not support, or None."""

    def native_fault(self, folder: Path) -> str | None:
        """Why our kernels do not run this folder's model here, or None."""
        if fault := build.load_fault():
            return f"no kernels: {fault}"
        fields = Fields(folder / "config.json", read_config(folder))
        if fault := self.refuse(fields):
            return fault
        sizes = {self.config(fields, side).head_dim for side in SIDES}
        odd = [size for size in sizes if size % LANES]
        return f"heads of {odd[0]} dimensions; multiples of {LANES} are wanted" if odd else None

    def load_native(self, folder: Path, dtype: torch.dtype, precision: Precision) -> NativeSpeech:
        """The model of a folder; raises `ModelError`, naming the file, for what cannot be used."""
        described = read_config(folder)
        fields, checkpoint = Fields(folder / "config.json", described), Checkpoint(folder, described)

        def parts(side: Side, scheme: Any) -> SpeechStack:
            make = linear_maker(scheme, dtype, CPU)
            return SpeechStack(self.stack(fields, side), fields, side, checkpoint, dtype, make)

        found: dict[str, Any] = {side: parts(side, precision.schemes[side]) for side in SIDES}
        found["stem"] = parts("encoder", None)
        return self.assembled(found, fields, precision.describe(dtype))

    def config(self, fields: Fields, side: Side) -> DecoderConfig:
        """Return the configuration of one stack; raises `ModelError` for an invalid config.json."""
        return self.stack(fields, side).read(fields, side)

    def assembled(self, parts: dict[str, Any], fields: Fields, description: str) -> NativeSpeech:
        """The model of its parts: those of encoder and decoder, and of the stem where they come from elsewhere."""
        stem = self.stem(parts.get("stem", parts["encoder"]), fields).eval()
        encoder = Encoder(parts["encoder"].config, parts["encoder"]).eval()
        decoder = Decoder(parts["decoder"].config, parts["decoder"]).eval()
        return NativeSpeech(stem, encoder, decoder, description)
