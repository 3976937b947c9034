"""The native decoder in place of transformers' model."""

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
from torchwright.models.decoder import UnsupportedArchitecture, load_decoder
from torchwright.models.decoder.families import read_decoder_config
from torchwright.models.decoder.native import NativeModel
from torchwright.optimization.techniques.base import Phase, Target, Technique

DEVICES = ("cpu", "cuda")
"""Those that have kernels."""


@dataclass(frozen=True, kw_only=True)
class Native(Technique):
    """Run a language model on Torchwright's own decoder: bfloat16, packed weights, paged cache, few calls a layer."""

    name: ClassVar[str] = "native"
    phase: ClassVar[Phase] = Phase.GRAPH
    own_kernels: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"language", "eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"decoder", "wide_weights", "wide_cache"})
    removes: ClassVar[frozenset[str]] = frozenset(
        ["eager", "exportable", "float32", "floating", "float_weights", "layers", "linear", "sdpa"]
    )

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        if device.kind not in DEVICES:
            return f"its kernels are for {' and '.join(DEVICES)}; this device is {device.kind}"
        return ops.fault(device.kind)

    def refuse(self, target: Target) -> str | None:
        if "language" not in target.properties:
            return None  # what it needs says so
        workload: Any = target.workload
        try:
            config = read_decoder_config(workload.folder)
        except (UnsupportedArchitecture, ModelError) as error:
            return error.reason
        return "its artifacts have no attention with sinks yet" if config.sinks else None

    def apply(self, target: Target) -> None:
        workload: Any = target.workload
        # transformers' weights go before the decoder's come: both together are more than a machine may hold.
        target.model = nn.Identity()
        gc.collect()
        loaded = load_decoder(workload.folder, torch.bfloat16, device=target.device.kind)
        target.model = NativeModel(loaded)
        target.compute_dtype = torch.bfloat16
        target.settings.engine = "native"
        layers = sum(isinstance(module, PackedLinear) for module in target.model.modules())
        self.cover(target, layers, unit="layers", kernel=loaded.stored or "packed bf16")
