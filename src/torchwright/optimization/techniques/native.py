"""The native decoder in place of transformers' model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.families import read_decoder_config
from torchwright.models.decoder.native import NativeModel
from torchwright.optimization.techniques.base import Target, Technique
from torchwright.optimization.techniques.shared.own_layers import OwnLayers, decoder_refusal


@dataclass(frozen=True, kw_only=True)
class Native(OwnLayers):
    """Run a language model on Torchwright's own decoder: bfloat16, packed weights, paged cache, few calls a layer."""

    name: ClassVar[str] = "native"
    needs: ClassVar[frozenset[str]] = frozenset({"language", "eager"})
    gives: ClassVar[frozenset[str]] = OwnLayers.gives | {"wide_cache"}
    tolerance: ClassVar[float] = Technique.tolerance
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def refuse(self, target: Target) -> str | None:
        if "language" not in target.properties:
            return None  # what it needs says so
        workload: Any = target.workload
        return decoder_refusal(lambda: read_decoder_config(workload.folder))

    def load(self, workload: Any, device: str) -> tuple[nn.Module, str]:
        loaded = load_decoder(workload.folder, torch.bfloat16, device=device)
        return NativeModel(loaded), loaded.stored or "packed bf16"
