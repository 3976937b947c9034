"""The native encoder and decoder in place of transformers' translator or summarizer."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.core.records import DeviceFacts
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.decoder.seq2seq.calls import NativeAnswers
from torchwright.models.decoder.seq2seq.load import load_seq2seq
from torchwright.optimization.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class NativeSeq2Seq(Technique):
    """Run an encoder-decoder text model on Torchwright's own layers: bfloat16, packed weights, paged cache."""

    name: ClassVar[str] = "native_seq2seq"
    phase: ClassVar[Phase] = Phase.GRAPH
    own_kernels: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"seq2seq", "eager"})
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

    def apply(self, target: Target) -> None:
        workload: Any = target.workload
        # transformers' weights go before ours come: both together are more than a machine may hold.
        target.model = nn.Identity()
        gc.collect()
        languages = {"language": workload.language, "source_language": workload.source_language}
        target.model = NativeAnswers(load_seq2seq(workload.folder, torch.bfloat16, **languages))
        target.compute_dtype = torch.bfloat16
        target.settings.engine = "native_seq2seq"
        layers = sum(isinstance(module, PackedLinear) for module in target.model.modules())
        self.cover(target, layers, unit="layers", kernel="packed bf16")
