"""The word error rate of a trained recognizer, by the code that `torchwright transcribe` runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchwright.core.errors import WorkloadError
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.score import normalizer, word_errors
from torchwright.train.media.listing import Item


def word_error_rate(model: Path, items: Sequence[Item], language: str) -> float | None:
    """Words that are wrong, left out or too many over those that were said; None where no sound can be read."""
    recognizer, wrong, said = load_speech(model), 0, 0
    for item in items:
        spoken = item.language or language
        try:
            found = recognizer.transcribe(item.path, language=spoken)
            words, errors = word_errors([str(item.target)], [found.text], normalizer(spoken, model))
        except WorkloadError:  # a broken file, reported by the evaluation before, or a text without words
            continue
        wrong, said = wrong + int(errors[0]), said + int(words[0])
    return wrong / said if said else None
