"""The native decoder behind a vision encoder on our kernels, in place of transformers' vision-language model."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.core.errors import ModelError
from torchwright.core.records import DeviceFacts
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hub.folder import read_config
from torchwright.hub.language_part import language_part
from torchwright.models.decoder import UnsupportedArchitecture, load_decoder
from torchwright.models.decoder.families import decoder_config
from torchwright.models.vision.calls import NativeAnswers
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.optimization.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class NativeVision(Technique):
    """Run a vision-language model on Torchwright's own layers: bfloat16, packed weights on both sides, paged cache."""

    name: ClassVar[str] = "native_vision"
    phase: ClassVar[Phase] = Phase.GRAPH
    own_kernels: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"vision_language", "eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"decoder", "wide_weights"})
    removes: ClassVar[frozenset[str]] = frozenset(
        ["eager", "exportable", "float32", "floating", "float_weights", "layers", "linear", "sdpa"]
    )
    tolerance: ClassVar[float] = 3e-2

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        if device.kind != "cpu":
            return f"its kernels are for CPUs; this device is {device.kind}"
        return ops.fault(device.kind)

    def refuse(self, target: Target) -> str | None:
        if "vision_language" not in target.properties:
            return None  # what it needs says so
        workload: Any = target.workload
        try:
            config = decoder_config(
                language_part(read_config(workload.folder)), workload.folder / "config.json"
            )
        except (UnsupportedArchitecture, ModelError) as error:
            return error.reason
        return "its artifacts have no attention with sinks yet" if config.sinks else None

    def apply(self, target: Target) -> None:
        workload: Any = target.workload
        # transformers' weights go before ours come: both together are more than a machine may hold.
        target.model = nn.Identity()
        gc.collect()
        loaded = load_decoder(workload.folder, torch.bfloat16)
        vision = loaded.vision = PictureEncoder(workload.folder, torch.bfloat16, quantize="none")
        target.model = NativeAnswers(loaded)
        target.compute_dtype = torch.bfloat16
        target.settings.engine = "native_vision"
        layers = sum(isinstance(module, PackedLinear) for module in target.model.modules())
        self.cover(target, layers, unit="layers", kernel=f"packed bf16; pictures by {vision.runs_as}")
