"""Options and results of speech recognition: plain data, the same in every process. No torch here."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Literal, get_args

from torchwright.core.errors import WorkloadError, unknown

MOST_WINDOWS = 16
PAUSES = ("silence", "a pause")
"""Reasons that need no remark if there is text."""
MOST_REMARKS = 5
"""Stretches that are named one by one."""
JOINED_SECONDS = 0.05
Timestamps = Literal["segment", "word"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Recognition options of every family; a model refuses those that it does not support."""

    language: str | None = None
    """A code such as "en", or None: the model's own guess from the first window, where it has several."""
    translate: bool = False
    """Into English, in place of the language that is spoken."""
    timestamps: Timestamps = "segment"
    prompt: str = ""
    """Text as if it had been said before: names and spellings to be expected."""
    temperature: float = 0.0
    """Temperature of the first attempt at a window, from 0 to 1."""
    only_speech: bool = True
    """Leave out text where no voice is heard, and text that the model itself finds improbable; say so in `unheard`."""
    batch: int = 1
    """Windows that are decoded side by side. With more than one, a sound is cut at pauses, and no part knows the text
    before it."""

    def __post_init__(self) -> None:
        if self.timestamps not in get_args(Timestamps):
            raise unknown("kind of timestamps", self.timestamps, get_args(Timestamps))
        if not 0 <= self.temperature <= 1:
            raise WorkloadError(f"temperature {self.temperature:g}", allowed="0 to 1")
        if not 1 <= self.batch <= MOST_WINDOWS:
            raise WorkloadError(f"a batch of {self.batch} windows", allowed=f"1 to {MOST_WINDOWS}")


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
    """Mean log-probability of the tokens in the segment's window."""
    temperature: float = 0.0
    no_speech: float | None = None
    """The probability that nobody speaks in the window, where the model says it."""
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unheard:
    """A stretch of sound, in seconds, that has no text for a reason."""

    start: float
    end: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Window:
    """The result of one window; text before `until` is settled, of `total` seconds if known."""

    until: float
    total: float | None
    segments: tuple[Segment, ...]
    language: str | None
    unheard: tuple[Unheard, ...] = ()
    notices: tuple[str, ...] = ()
    """Sentences about the sound that are new with this window."""


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The transcript of a recording. `seconds` is the part that was read; `language` may be unknown (None)."""

    seconds: float = 0.0
    language: str | None = None
    segments: tuple[Segment, ...] = field(default=())
    unheard: tuple[Unheard, ...] = field(default=())
    notices: tuple[str, ...] = field(default=())

    @property
    def text(self) -> str:
        """The whole transcript in one line."""
        return " ".join(segment.text for segment in self.segments)

    def and_then(self, window: Window) -> Transcript:
        """Return the transcript with one more window."""
        return Transcript(
            seconds=window.until,
            language=window.language,
            segments=self.segments + window.segments,
            unheard=_joined(self.unheard + window.unheard),
            notices=self.notices + window.notices,
        )

    def remarks(self) -> list[str]:
        """Return what to tell the user: the sound's notices, and where text was left out and why."""
        reported = [one for one in self.unheard if one.reason not in PAUSES or not self.segments]
        found = [
            f"no speech from {one.start:.1f} to {one.end:.1f} s: {one.reason}"
            for one in reported[:MOST_REMARKS]
        ]
        if len(reported) > MOST_REMARKS:
            found.append(f"no speech in {len(reported) - MOST_REMARKS} other places")
        if not self.segments and not found:
            found = ["no speech: the model writes no words of it"]
        return [*self.notices, *found]


def _joined(unheard: tuple[Unheard, ...]) -> tuple[Unheard, ...]:
    """Join stretches that follow each other for the same reason."""
    found = list[Unheard]()
    for one in unheard:
        last = found[-1] if found else None
        if last is not None and last.reason == one.reason and one.start - last.end < JOINED_SECONDS:
            found[-1] = Unheard(start=last.start, end=max(last.end, one.end), reason=one.reason)
        else:
            found.append(one)
    return tuple(found)


def compression_ratio(text: str) -> float:
    """Bytes of UTF-8 over those that zlib makes of them."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
