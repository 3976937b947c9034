"""A window's tokens cut at their timestamps, and where the next window begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchwright.models.speech.whisper.vocabulary import Vocabulary

FRAMES_PER_TICK = 2


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens between two timestamps, both of which are among them, and the ticks at which they lie."""

    begin: int
    end: int
    tokens: tuple[int, ...]


def cut(tokens: Sequence[int], vocabulary: Vocabulary, frames: int) -> tuple[list[Piece], int]:
    """The pieces that are whole, and how many frames further the next window begins.

    Two timestamps in a row end a piece and begin the next one. What follows the last such pair was cut off by the
    window's end: it is dropped, and the next window begins there, so that no word is lost or heard twice. A window
    that ends in one timestamp has nothing behind it, one without any pair is a single piece: the next window begins
    where it ends (openai/whisper, transcribe.py).
    """
    first = vocabulary.first_tick
    is_tick = [token >= first for token in tokens]
    ends = [i for i in range(1, len(tokens)) if is_tick[i - 1] and is_tick[i]]
    finished = is_tick[-2:] == [False, True]
    if not ends:
        return [_piece(tokens, vocabulary, frames)] if tokens else [], frames
    if finished:
        ends.append(len(tokens))
    begins = [0, *ends[:-1]]
    pieces = [_piece(tokens[begin:end], vocabulary, frames) for begin, end in zip(begins, ends, strict=True)]
    return pieces, frames if finished else pieces[-1].end * FRAMES_PER_TICK


def _piece(tokens: Sequence[int], vocabulary: Vocabulary, frames: int) -> Piece:
    """A piece whose end nobody said lasts until the window's."""
    ticks = vocabulary.ticks(tokens)
    begin = ticks[0] if ticks else 0
    end = ticks[-1] if len(ticks) > 1 else frames // FRAMES_PER_TICK
    return Piece(begin=begin, end=max(begin, end), tokens=tuple(tokens))
