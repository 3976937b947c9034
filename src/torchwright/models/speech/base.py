"""Base class of speech model families: windows of a recording with their segments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from torchwright.core.errors import WorkloadError
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.models.speech.calls import CacheSizes
from torchwright.models.speech.sound import Sound, opened
from torchwright.models.speech.steps import SpeechModel
from torchwright.models.speech.transcript import Options, Transcript, Window


class Recognizer(ABC):
    """A speech model of one family, opened by `load_speech`."""

    model_type: ClassVar[str]
    """`model_type` in config.json."""
    positions: int
    """Tokens of a window at most, its prompt included."""
    window: int
    """Samples of a window at most."""

    def __init__(self, folder: Path, model: SpeechModel) -> None:
        self.folder, self.model = folder, model
        self.tokenizer: Any = open_tokenizer(folder)

    @classmethod
    @abstractmethod
    def cache(cls, folder: Path) -> CacheSizes:
        """Return the cache sizes of a folder's decoder; raises `ModelError` if config.json lacks them."""

    @abstractmethod
    def check(self, options: Options) -> None:
        """Raises `WorkloadError` for what this model cannot do."""

    @abstractmethod
    def heard(self, samples: np.ndarray) -> torch.Tensor:
        """Return the encoder's input for a window of samples, in float32."""

    @abstractmethod
    def begin(self, language: str | None) -> list[int]:
        """The tokens that a window's text follows."""

    @abstractmethod
    def recognize(self, sound: Sound, options: Options) -> Iterator[Window]:
        """Yield a recording's windows in order, each when it is done. Every second is in exactly one window."""

    @torch.inference_mode()
    def windows(self, source: Any, **options: Any) -> Iterator[Window]:
        """Windows of a file, or of samples (T,) at 16 kHz in a float type, as they are found.

        `options` are the fields of `Options`. Raises `SoundError` for sound that cannot be read, as far as it was read,
        and `WorkloadError` for what the model cannot do.
        """
        asked = Options(**options)
        self.check(asked)
        with opened(source, until_fault=True) as sound:
            done, told = False, 0
            for window in self.recognize(sound, asked):
                done = True
                new, told = tuple(sound.notices[told:]), len(sound.notices)
                yield replace(window, notices=new) if new else window
            if sound.fault is not None:
                raise sound.fault
            if not done:
                raise WorkloadError(f"{sound.name} is too short for a window", found="no samples")

    def transcribe(self, source: Any, **options: Any) -> Transcript:
        """All of a file, or of samples, in one piece: takes and raises what `windows` does."""
        whole = Transcript()
        for window in self.windows(source, **options):
            whole = whole.and_then(window)
        return whole
