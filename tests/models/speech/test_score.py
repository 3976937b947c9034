"""Word error rate against a plain dynamic program, and its interval."""

from __future__ import annotations

import random

import pytest

from torchwright.core.errors import WorkloadError
from torchwright.models.speech.score import edits, normalizer, word_error_rate


def slow(reference: list[str], text: list[str]) -> int:
    """Levenshtein's distance, cell by cell."""
    row = list(range(len(text) + 1))
    for i, word in enumerate(reference, 1):
        before, row = row, [i]
        for j, other in enumerate(text, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (word != other)))
    return row[-1]


def test_edits_are_the_fewest():
    for _ in range(200):
        reference, text = (random.choices("abcd", k=random.randint(0, 12)) for _ in range(2))
        assert edits(reference, text) == slow(reference, text)


def test_the_rate_is_jiwers():
    jiwer = pytest.importorskip("jiwer", reason="another implementation")
    words = ["one", "two", "three", "four"]
    texts = [[" ".join(random.choices(words, k=random.randint(1, 9))) for _ in range(20)] for _ in range(2)]
    assert word_error_rate(*texts, str.lower).value == pytest.approx(jiwer.wer(*texts))


def test_english_is_normalized_as_whisper_does():
    english = normalizer("en")
    assert english("Mr. Smith can't pay twenty-one dollars, um, okay?") == "mister smith can not pay $21 okay"
    assert normalizer("de")("Größe, 5 m!").split() == ["größe", "5", "m"]


def test_the_interval_is_over_utterances():
    references = ["a b c d"] * 40
    assert word_error_rate(references, references, str.lower).high == 0
    same = word_error_rate(references, ["a b c"] * 40, str.lower)
    assert (same.low, same.value, same.high) == (0.25, 0.25, 0.25)
    half = word_error_rate(references, ["a b c d", "x"] * 20, str.lower)
    assert half.value == 0.5
    assert 0.2 < half.low < 0.45 < 0.55 < half.high < 0.8
    assert word_error_rate(references, ["a b c d", "x"] * 20, str.lower) == half


def test_what_has_no_rate_is_refused():
    with pytest.raises(WorkloadError, match="1 texts for 2 references"):
        word_error_rate(["a", "b"], ["a"], str.lower)
    with pytest.raises(WorkloadError, match="no words"):
        word_error_rate(["", "!"], ["a", "b"], normalizer())
