"""Running an encoder and a decoder of text on native layers, whose packed weights are plain data."""

from __future__ import annotations

from typing import ClassVar

from torchwright.optimization.engines.base import MODEL, Kept, Ready
from torchwright.optimization.engines.native import NativeEngine


class NativeSeq2SeqEngine(NativeEngine):
    """Calls a `NativeAnswers`."""

    name: ClassVar[str] = "native_seq2seq"
    how: ClassVar[str] = "native encoder and decoder"

    @classmethod
    def load(cls, kept: Kept) -> Ready | None:
        from torchwright.models.decoder.seq2seq.calls import NativeAnswers

        model = NativeAnswers.load(kept.path, kept.path / MODEL)
        return Ready(how=cls.how, run=cls(model), answers=model.loaded)
