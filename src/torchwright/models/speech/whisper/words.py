"""Tokens as words with their times."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from torchwright.models.speech.transcript import Word
from torchwright.models.speech.whisper import times

BEFORE = "\"'“¡¿([{-"
"""Punctuation that belongs to the word behind it."""
AFTER = "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the word before it."""
WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")
"""Languages in which each character stands for a word."""
BROKEN = "\ufffd"
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Span:
    """A word's text, and how many tokens it has."""

    text: str
    tokens: int


def split(tokens: Sequence[int], decode: Decode, language: str | None) -> list[Span]:
    """Text tokens as words with the spaces and punctuation around them (openai/whisper, tokenizer.py and timing.py).

    Every token is counted in one word.
    """
    pieces = _characters(tokens, decode)
    return _with_punctuation(pieces if language in WITHOUT_SPACES else _by_spaces(pieces))


def timed(
    texts: Sequence[Sequence[int]],
    begins: Sequence[float],
    within: Sequence[times.Span],
    loud_T: np.ndarray,
    decode: Decode,
    language: str | None,
) -> list[list[Word]]:
    """Return each text's words in ticks, all of them inside of the text's span of `within` where it has room.

    `begins` has the tick of every token, and of the end. A word has some time, and it begins and ends on sound.
    """
    place, spans, found = 0, list[times.Span](), list[list[str]]()
    for text, (least, most) in zip(texts, within, strict=True):
        words = split(text, decode, language)
        places = np.cumsum([place, *(word.tokens for word in words)])
        bounds = [min(max(begins[i], least), most) for i in places]
        found_at = times.shared(bounds, [len(word.text.strip()) for word in words], loud_T)
        place = int(places[-1])
        kept = [(word.text, at) for word, at in zip(words, found_at, strict=True) if word.text.strip()]
        spans += times.apart([at for _, at in kept], most, least)
        found.append([word for word, _ in kept])
    moved = iter(times.apart(spans, len(loud_T)))
    return [
        [Word(start=start, end=end, text=word) for word, (start, end) in zip(words, moved, strict=False)]
        for words in found
    ]


def _characters(tokens: Sequence[int], decode: Decode) -> list[Span]:
    """The fewest tokens together that end with a character's end."""
    whole = decode(tokens)
    found, begin, place = list[Span](), 0, 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[begin:end])
        broken = text.find(BROKEN)
        # It may be the text's own, where no later token mends it.
        if broken < 0 or whole[place + broken : place + broken + 1] == BROKEN or end == len(tokens):
            found.append(Span(text, end - begin))
            begin, place = end, place + len(text)
    return found


def _by_spaces(pieces: Sequence[Span]) -> list[Span]:
    found = list[Span]()
    for piece in pieces:
        mark = piece.text.strip() in string.punctuation  # as is an empty text
        if found and not piece.text.startswith(" ") and not mark:
            found[-1] = Span(found[-1].text + piece.text, found[-1].tokens + piece.tokens)
        else:
            found.append(piece)
    return found


def _with_punctuation(words: Sequence[Span]) -> list[Span]:
    found = list[Span]()
    for word in reversed(words):
        if found and word.text.startswith(" ") and word.text.strip() in BEFORE:
            word = _joined(word, found.pop())
        found.append(word)
    together = list[Span]()
    for word in reversed(found):
        if together and not together[-1].text.endswith(" ") and word.text in AFTER:
            word = _joined(together.pop(), word)
        together.append(word)
    return together


def _joined(one: Span, two: Span) -> Span:
    return Span(one.text + two.text, one.tokens + two.tokens)
