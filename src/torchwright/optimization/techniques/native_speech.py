"""The native encoder and decoder in place of transformers' speech model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from torchwright.core.errors import ModelError
from torchwright.core.records import DeviceFacts
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hub.folder import read_config
from torchwright.models.decoder.precision import Precision
from torchwright.models.speech.load import NATIVE
from torchwright.models.speech.native_calls import NativeCalls
from torchwright.optimization.techniques.base import Target
from torchwright.optimization.techniques.shared.own_layers import OwnLayers


@dataclass(frozen=True, kw_only=True)
class NativeSpeech(OwnLayers):
    """Run a speech model on Torchwright's own encoder and decoder: packed weights, paged cache, a step as one call."""

    name: ClassVar[str] = "native_speech"
    needs: ClassVar[frozenset[str]] = frozenset({"speech", "eager"})
    counted: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, PackedLinear)

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype of weights and activations; in float32, linear layers are PyTorch's and cannot be quantized."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return None if device.kind == "cpu" else f"its kernels are for cpu; this device is {device.kind}"

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def variants(self, target: Target) -> Iterable[Self]:
        yield replace(self, dtype="bfloat16")
        yield replace(self, dtype="float32")

    def refuse(self, target: Target) -> str | None:
        if "speech" not in target.properties:
            return None  # what it needs says so
        workload: Any = target.workload
        kind = read_config(workload.folder)["model_type"]
        if kind not in NATIVE:
            return f"a {kind} runs on transformers' modules"
        try:
            return NATIVE[kind].native_fault(workload.folder)
        except ModelError as error:
            return error.reason

    def load(self, workload: Any, device: str) -> tuple[nn.Module, str]:
        native = NATIVE[read_config(workload.folder)["model_type"]]
        model = NativeCalls(native.load_native(workload.folder, self.compute_dtype, Precision()))
        packed = any(isinstance(module, PackedLinear) for module in model.modules())
        return model, "packed bf16" if packed else "PyTorch's float32"
