"""Word error rate, normalized as Whisper's evaluation does, with an interval over utterances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from torchwright.core.errors import WorkloadError
from torchwright.core.records import Interval
from torchwright.hub.folder import find_object

RESAMPLES = 2_000
SPELLINGS = "normalizer.json"
"""British spellings to American ones, in the folders of Whisper that have it."""


def normalizer(language: str | None = "en", folder: Path | None = None) -> Callable[[str], str]:
    """Return the normalizer before comparison: transformers' copy of Whisper's own, the basic one except for English.

    English numbers, contractions and titles are written in one way, and spellings where `folder` has a list of them.
    """
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

    if language != "en":
        return BasicTextNormalizer()
    return EnglishTextNormalizer(find_object(folder / SPELLINGS) if folder else {})


def word_error_rate(
    references: Sequence[str], texts: Sequence[str], normalize: Callable[[str], str], *, seed: int = 0
) -> Interval:
    """Words to insert, delete or replace over the words of the references, of all utterances together.

    The interval is the 95% one of `RESAMPLES` draws of utterances (bootstrap, percentiles): of a few utterances it says
    little. Raises `WorkloadError` where there are not as many texts as references, or no words in these.
    """
    return rate(*word_errors(references, texts, normalize), seed=seed)


def word_errors(
    references: Sequence[str], texts: Sequence[str], normalize: Callable[[str], str]
) -> tuple[np.ndarray, np.ndarray]:
    """Count each utterance's reference words and errors, both (U,); raises as `word_error_rate` does."""
    if len(references) != len(texts):
        raise WorkloadError(f"{len(texts)} texts for {len(references)} references")
    pairs = [
        (normalize(one).split(), normalize(other).split())
        for one, other in zip(references, texts, strict=True)
    ]
    words_U = np.array([len(reference) for reference, _ in pairs])
    if not words_U.sum():
        raise WorkloadError("the references have no words")
    return words_U, np.array([edits(reference, text) for reference, text in pairs])


def rate(words_U: np.ndarray, errors_U: np.ndarray, *, seed: int = 0) -> Interval:
    """Errors of all utterances over their words, with its interval; errors may be the difference of two counts."""
    drawn_RU = np.random.default_rng(seed).integers(0, len(words_U), (RESAMPLES, len(words_U)))
    rates_R = errors_U[drawn_RU].sum(1) / np.maximum(words_U[drawn_RU].sum(1), 1)
    low, high = np.quantile(rates_R, [0.025, 0.975])
    return Interval(value=float(errors_U.sum() / words_U.sum()), low=float(low), high=float(high))


def edits(reference: Sequence[str], text: Sequence[str]) -> int:
    """The fewest insertions, deletions and replacements that make one list of words the other (Levenshtein)."""
    numbers = {word: number for number, word in enumerate({*reference, *text})}
    text_T = np.array([numbers[word] for word in text], dtype=np.int64)
    places = np.arange(len(text) + 1)
    row = places.copy()
    for word in reference:
        best = row + 1  # deleted
        best[1:] = np.minimum(best[1:], row[:-1] + (text_T != numbers[word]))
        row = np.minimum.accumulate(best - places) + places  # inserted
    return int(row[-1])
