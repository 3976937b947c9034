"""The native encoder and decoder in place of transformers' speech model."""

from __future__ import annotations

import gc
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
from torchwright.optimization.techniques.base import Phase, Target, Technique

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class NativeSpeech(Technique):
    """Run a speech model on Torchwright's own encoder and decoder: packed weights, paged cache, a step as one call."""

    name: ClassVar[str] = "native_speech"
    phase: ClassVar[Phase] = Phase.GRAPH
    own_kernels: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"speech", "eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"decoder", "wide_weights"})
    removes: ClassVar[frozenset[str]] = frozenset(
        ["eager", "exportable", "float32", "floating", "float_weights", "layers", "linear", "sdpa"]
    )
    tolerance: ClassVar[float] = 3e-2

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype of weights and activations; in float32, linear layers are PyTorch's and cannot be quantized."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        return None if device.kind == "cpu" else f"its kernels are for CPUs; this device is {device.kind}"

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

    def apply(self, target: Target) -> None:
        workload: Any = target.workload
        # transformers' weights go before ours come: both together are more than a machine may hold.
        target.model = nn.Identity()
        gc.collect()
        dtype, native = DTYPES[self.dtype], NATIVE[read_config(workload.folder)["model_type"]]
        target.model = NativeCalls(native.load_native(workload.folder, dtype, Precision()))
        target.compute_dtype = dtype
        target.settings.engine = "native_speech"
        packed = sum(isinstance(module, PackedLinear) for module in target.model.modules())
        layers = sum(isinstance(module, nn.Linear | PackedLinear) for module in target.model.modules())
        self.cover(target, layers, unit="layers", kernel="packed bf16" if packed else "PyTorch's float32")
