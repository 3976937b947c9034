"""Stretches of a sound on their way through the windows, several side by side, their text given out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torchwright.models.speech.sound import Sound
from torchwright.models.speech.transcript import Window


@dataclass
class Track:
    """A sound, or a part of one, whose windows follow each other."""

    sound: Sound
    begin: int = 0
    """Its first sample in the whole sound."""
    before: list[int] = field(default_factory=list)
    """Tokens of the text before the next window."""
    frame: int = 0
    """Start of the next window."""
    found: deque[Window] = field(default_factory=deque)
    """Finished windows that were not emitted yet."""
    done: bool = False


def in_order(
    tracks: Iterable[Track], count: int, advance: Callable[[Sequence[Track]], None]
) -> Iterator[Window]:
    """The windows of tracks, of which `count` at most are under way; `advance` finds one more of each, or ends it."""
    waiting, active = iter(tracks), deque[Track]()
    while True:
        while len(active) < count and (track := next(waiting, None)) is not None:
            active.append(track)
        if not active:
            return
        advance([track for track in active if not track.done])
        while active:
            while active[0].found:
                yield active[0].found.popleft()
            if not active[0].done:
                break
            active.popleft()
