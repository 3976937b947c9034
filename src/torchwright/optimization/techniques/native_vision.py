"""The native decoder behind a vision encoder on our kernels, in place of transformers' vision-language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.hub.folder import read_config
from torchwright.hub.language_part import language_part
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.families import decoder_config
from torchwright.models.vision.calls import NativeAnswers
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.optimization.techniques.base import Target
from torchwright.optimization.techniques.shared.own_layers import OwnLayers, decoder_refusal


@dataclass(frozen=True, kw_only=True)
class NativeVision(OwnLayers):
    """Run a vision-language model on Torchwright's own layers: bfloat16, packed weights on both sides, paged cache."""

    name: ClassVar[str] = "native_vision"
    needs: ClassVar[frozenset[str]] = frozenset({"vision_language", "eager"})

    def refuse(self, target: Target) -> str | None:
        if "vision_language" not in target.properties:
            return None  # what it needs says so
        workload: Any = target.workload
        file = workload.folder / "config.json"
        return decoder_refusal(lambda: decoder_config(language_part(read_config(workload.folder)), file))

    def load(self, workload: Any, device: str) -> tuple[nn.Module, str]:
        loaded = load_decoder(workload.folder, torch.bfloat16)
        vision = loaded.vision = PictureEncoder(workload.folder, torch.bfloat16, quantize="none")
        return NativeAnswers(loaded), f"packed bf16; pictures by {vision.runs_as}"
