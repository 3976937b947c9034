"""Running a vision-language model on native layers, whose packed weights are plain data."""

from __future__ import annotations

from typing import ClassVar

from torchwright.optimization.engines.base import MODEL, Kept, Ready
from torchwright.optimization.engines.native import NativeEngine


class NativeVisionEngine(NativeEngine):
    """Calls a `NativeAnswers` of a vision-language model."""

    name: ClassVar[str] = "native_vision"
    how: ClassVar[str] = "native decoder behind a vision encoder"

    @classmethod
    def load(cls, kept: Kept) -> Ready | None:
        from torchwright.models.vision.calls import NativeAnswers

        model = NativeAnswers.load(kept.path, kept.path / MODEL)
        model.loaded.threads = kept.threads
        return Ready(how=cls.how, run=cls(model), answers=model.loaded)
