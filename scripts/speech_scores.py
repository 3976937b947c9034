"""Word error rates of a small Whisper on sentences that `speech_corpus.py` makes: of the original and of our layers.

Words are compared as Whisper's own evaluation compares them (`torchwright.models.speech.score`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import speech_corpus as corpus
from torchwright.core.records import Interval
from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.load import family, load_speech
from torchwright.models.speech.score import normalizer, rate, word_errors
from torchwright.models.speech.steps import TransformersSpeech
from torchwright.workloads.huggingface import load_model

ORIGINAL = "transformers, float32"
QUANTIZED = ("w8a8", "encoder=w8a8", "decoder=w8a8", "w4a8", "w4a16")
FIRST_SEED = 1_000_000
"""Seeds of training windows lie below it."""


@dataclass(frozen=True)
class Sentences:
    """Windows with one sentence each, the same for equal seeds."""

    spoken: list[corpus.Spoken]

    @classmethod
    def make(cls, count: int, voices: tuple[str, ...], seed: int = FIRST_SEED) -> Sentences:
        return cls([corpus.window(seed + index, voices, single=True) for index in range(count)])

    @property
    def texts(self) -> list[str]:
        return [" ".join(text for text, _, _ in one.said if text is not None) for one in self.spoken]

    def errors(self, model: Recognizer) -> tuple[np.ndarray, np.ndarray]:
        """Words of each sentence, and how many the model got wrong: both (U,)."""
        heard = [model.transcribe(one.samples).text for one in self.spoken]
        return word_errors(self.texts, heard, normalizer("en", model.folder))


def original(folder: Path) -> Recognizer:
    """Return a recognizer of transformers' own modules in float32."""
    return family(folder)(folder, TransformersSpeech(load_model(folder, "AutoModelForSpeechSeq2Seq")))


def rungs(folder: Path) -> dict[str, Callable[[], Recognizer]]:
    """Return a function for each way of running a folder's model, the original first."""
    ways: dict[str, Callable[[], Recognizer]] = {
        ORIGINAL: lambda: original(folder),
        "float32": lambda: load_speech(folder),
        "bf16": lambda: load_speech(folder, torch.bfloat16),
    }
    return ways | {name: lambda name=name: load_speech(folder, torch.bfloat16, name) for name in QUANTIZED}


def growth(words_U: np.ndarray, errors_U: np.ndarray, before_U: np.ndarray) -> Interval:
    """Return the growth of a word error rate, over the same sentences."""
    return rate(words_U, errors_U - before_U)


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(found: Interval) -> str:
    return f"{found.value:.1%} ({found.low:.1%} to {found.high:.1%})"
