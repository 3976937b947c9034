"""Running a speech model on the native encoder and decoder, whose packed weights are plain data."""

from __future__ import annotations

from typing import ClassVar

from torchwright.optimization.engines.base import MODEL, Kept, Ready
from torchwright.optimization.engines.native import NativeEngine


class NativeSpeechEngine(NativeEngine):
    """Calls a `NativeCalls`."""

    name: ClassVar[str] = "native_speech"
    how: ClassVar[str] = "native encoder and decoder"
    whole: ClassVar[bool] = False  # a window has one size

    @classmethod
    def load(cls, kept: Kept) -> Ready | None:
        from torchwright.models.speech.load import family
        from torchwright.models.speech.native_calls import NativeCalls

        model = NativeCalls.load(kept.path, kept.path / MODEL)
        folder = kept.path / MODEL
        answers = family(folder)(folder, model.speech)
        return Ready(how=cls.how, run=cls(model), answers=answers)
