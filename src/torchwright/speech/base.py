"""What every family of speech models answers: windows of a sound with the segments found in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch

from torchwright.errors import WorkloadError, unknown
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.speech.sound import Sound, opened
from torchwright.speech.steps import SpeechModel

Timestamps = Literal["segment", "word"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a caller may ask of any family; a model refuses what it cannot do."""

    language: str | None = None
    """A code such as "en", or None: the model's own guess from the first window, where it has several."""
    translate: bool = False
    """Into English, in place of the language that is spoken."""
    timestamps: Timestamps = "segment"

    def __post_init__(self) -> None:
        if self.timestamps not in get_args(Timestamps):
            raise unknown("kind of timestamps", self.timestamps, get_args(Timestamps))


@dataclass(frozen=True, kw_only=True)
class Word:
    """One word with its spaces and punctuation, in seconds from the sound's beginning."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of text and where it was said, in seconds from the sound's beginning."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    mean_logprob: float
    """Of the tokens of the window that it was found in, by the model."""
    temperature: float = 0.0
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Window:
    """What was found in one window; the text before `until` is settled, of `total` seconds where that is known."""

    until: float
    total: float | None
    segments: tuple[Segment, ...]
    language: str | None


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """A whole sound's text. `seconds` is how much of it was read; `language` is None where the model does not say."""

    seconds: float = 0.0
    language: str | None = None
    segments: tuple[Segment, ...] = field(default=())

    @property
    def text(self) -> str:
        """All of it in one line."""
        return " ".join(segment.text for segment in self.segments)

    def and_then(self, window: Window) -> Transcript:
        """With one more window."""
        return Transcript(
            seconds=window.until, language=window.language, segments=self.segments + window.segments
        )


class Recognizer(ABC):
    """A speech model of one family, opened by `load_speech`."""

    model_type: ClassVar[str]
    """Of config.json."""

    def __init__(self, folder: Path, model: SpeechModel) -> None:
        self.folder, self.model = folder, model
        self.tokenizer: Any = open_tokenizer(folder)

    @abstractmethod
    def check(self, options: Options) -> None:
        """Raises `WorkloadError` for what this model cannot do."""

    @abstractmethod
    def recognize(self, sound: Sound, options: Options) -> Iterator[Window]:
        """The windows of a sound in order, each when it is done. Every second of it is in exactly one of them."""

    @torch.inference_mode()
    def windows(
        self,
        source: Any,
        *,
        language: str | None = None,
        translate: bool = False,
        timestamps: Timestamps = "segment",
    ) -> Iterator[Window]:
        """Windows of a file, or of samples (T,) at 16 kHz, as they are found.

        Raises `SoundError` for sound that cannot be read, as far as it was read, and `WorkloadError` for what the
        model cannot do.
        """
        options = Options(language=language, translate=translate, timestamps=timestamps)
        self.check(options)
        with opened(source) as sound:
            done = False
            for window in self.recognize(sound, options):
                done = True
                yield window
            if not done:
                raise WorkloadError(f"{sound.name} is too short for a window", found="no samples")

    def transcribe(
        self,
        source: Any,
        *,
        language: str | None = None,
        translate: bool = False,
        timestamps: Timestamps = "segment",
    ) -> Transcript:
        """All of a file, or of samples (T,) at 16 kHz in a float type; the errors are those of `windows`."""
        whole = Transcript()
        for window in self.windows(source, language=language, translate=translate, timestamps=timestamps):
            whole = whole.and_then(window)
        return whole
