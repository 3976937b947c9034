"""The native encoder and decoder in place of transformers' translator or summarizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from torchwright.models.decoder.seq2seq.calls import NativeAnswers
from torchwright.models.decoder.seq2seq.load import load_seq2seq
from torchwright.optimization.techniques.shared.own_layers import OwnLayers


@dataclass(frozen=True, kw_only=True)
class NativeSeq2Seq(OwnLayers):
    """Run an encoder-decoder text model on Torchwright's own layers: bfloat16, packed weights, paged cache."""

    name: ClassVar[str] = "native_seq2seq"
    needs: ClassVar[frozenset[str]] = frozenset({"seq2seq", "eager"})

    def load(self, workload: Any, device: str) -> tuple[nn.Module, str]:
        languages = {"language": workload.language, "source_language": workload.source_language}
        return NativeAnswers(load_seq2seq(workload.folder, torch.bfloat16, **languages)), "packed bf16"
