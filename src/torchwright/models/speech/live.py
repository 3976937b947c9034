"""Live transcription: text on which two hypotheses in a row agree is settled.

After Macháček, Dabre and Bojar, "Turning Whisper into Real-Time Transcription System" (2023). Sound without settled
text is transcribed again as it grows. Words that begin two hypotheses in a row are emitted and stay. A word is thus
emitted at most two steps after its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.sound import RATE
from torchwright.models.speech.transcript import Options, Word

STEP_SECONDS = 1.0
"""Seconds of sound between two hypotheses; more if the machine is slower."""
CUT, FULL = 0.5, 0.8
"""Shares of a window: from the first on, settled sound is dropped; at the second, everything settles."""
TAIL = 5
"""Words that may be heard again behind the place up to which text has settled."""
JITTER_SECONDS = 0.1
"""Change of a word's time between two hypotheses, in seconds."""
PROMPT_CHARACTERS = 200
"""Characters of settled text in the model's prompt."""


class Live:
    """One speaker's text; raises `WorkloadError` for a model that does not say when a word was spoken.

    `options` are those of `Recognizer.windows`, without `timestamps` and `batch`.
    """

    def __init__(self, recognizer: Recognizer, **options: object) -> None:
        self._recognizer, self._options = recognizer, {**options, "timestamps": "word"}
        recognizer.check(Options(**self._options))  # pyright: ignore[reportArgumentType]
        self._held = np.empty(0, np.float32)
        self._begin = 0.0
        """When the held sound begins, in seconds."""
        self._until = 0.0
        """Up to where text has settled."""
        self._settled = list[str]()
        self._open = list[Word]()
        """The last hypothesis about what has not settled."""
        self.instead: str | None = None
        """The last reason for missing text; None after the first word."""

    def hear(self, samples: np.ndarray) -> str:
        """More samples (T,) at 16 kHz in float32; returns the text that has settled by them, often none."""
        self._held = np.concatenate([self._held, samples])
        words = self._hypothesis()
        agreed = _agreed(_texts(self._open), _texts(words))
        if len(self._held) >= FULL * self._recognizer.window:
            agreed = max(agreed, len(words) - 1, min(1, len(words)))  # the last one may be cut off
        text = self._settle(words[:agreed])
        self._open = words[agreed:]
        self._let_go()
        return text

    def rest(self) -> str:
        """The last hypothesis about what has not settled, at the end."""
        words, self._open = self._open, []
        return self._settle(words)

    def _hypothesis(self) -> list[Word]:
        """The words behind the settled ones, in seconds from the sound's beginning."""
        if len(self._held) < RATE // 10 or not self._held.any():
            self._missed("silence")
            return []
        prompt = " ".join((str(self._options.get("prompt", "")), "".join(self._settled)[-PROMPT_CHARACTERS:]))
        found = self._recognizer.transcribe(self._held, **(self._options | {"prompt": prompt.strip()}))
        words = [
            Word(start=self._begin + word.start, end=self._begin + word.end, text=word.text)
            for segment in found.segments
            for word in segment.words
        ]
        if not words:
            self._missed(*(one.reason for one in found.unheard))
        words = [word for word in words if word.end > self._until + JITTER_SECONDS]
        return words[_repeated(self._settled, words) :]

    def _missed(self, *reasons: str) -> None:
        if reasons and not self._settled:
            self.instead = reasons[-1]

    def _settle(self, words: Sequence[Word]) -> str:
        if words:
            self._until, self.instead = words[-1].end, None
        texts = [word.text for word in words]
        self._settled = [*self._settled, *texts][-10 * TAIL :]
        return "".join(texts).strip()

    def _let_go(self) -> None:
        """Sound whose text has settled, or in which nothing was found."""
        end = self._begin + len(self._held) / RATE
        if len(self._held) < CUT * self._recognizer.window:
            return
        said = self._open or self._until > self._begin + JITTER_SECONDS
        keep = self._until if said else end - STEP_SECONDS
        count = round((min(max(keep, self._begin), end) - self._begin) * RATE)
        self._held = self._held[count:]
        self._begin += count / RATE


def _repeated(settled: Sequence[str], words: Sequence[Word]) -> int:
    """Count the leading words that repeat the last settled ones."""
    for count in range(min(TAIL, len(settled), len(words)), 0, -1):
        if [_plain(text) for text in settled[-count:]] == _texts(words[:count]):
            return count
    return 0


def _agreed(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _texts(words: Sequence[Word]) -> list[str]:
    return [_plain(word.text) for word in words]


def _plain(text: str) -> str:
    """A word without what differs from one hypothesis to the next."""
    return text.strip().strip(".,;:!?…").casefold()
