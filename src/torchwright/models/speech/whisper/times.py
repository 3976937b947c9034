"""Times of words and segments made fit for subtitles: inside of their segment, on sound, and never empty.

Times are in ticks of a window. `loud_T` says which ticks are loud enough to hold speech (`pauses.loud_frames`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

Span = tuple[float, float]
LEAST = 4
"""Ticks of a word at least, where its neighbours have them to share: 80 ms, as long as a quick "a"."""


def trimmed(span: Span, loud_T: np.ndarray, pause: int = 1) -> Span:
    """Return a span without its quiet ends, if they last `pause` ticks or more; a span without sound stays."""
    begin, end = span
    loud = np.flatnonzero(loud_T[int(begin) : int(np.ceil(end))])
    if not len(loud):
        return span
    first, last = int(begin) + int(loud[0]), int(begin) + int(loud[-1]) + 1
    return first if first - begin >= pause else begin, last if end - last >= pause else end


def shared(bounds: Sequence[float], letters: Sequence[int], loud_T: np.ndarray) -> list[Span]:
    """Return the span of each word between its bounds, of which there is one more than words.

    The alignment gives some words hardly any time. They share the time of the next word by their letters, or of the
    word before them at a segment's end.
    """
    found, first, count = list[Span](), 0, len(letters)
    while first < count:
        room = (i for i in range(first, count) if bounds[i + 1] - bounds[first] >= LEAST * (i + 1 - first))
        last = next(room, count - 1)
        if bounds[count] - bounds[last + 1] < LEAST * (count - last - 1):
            last = count - 1
        begin, end = trimmed((bounds[first], bounds[last + 1]), loud_T)
        shares = np.cumsum([0, *(max(1, n) for n in letters[first : last + 1])])
        times = begin + (end - begin) * shares / shares[-1]
        found += [(float(a), float(b)) for a, b in itertools.pairwise(times)]
        first = last + 1
    return found


def apart(spans: Sequence[Span], limit: float, first: float = 0.0) -> list[Span]:
    """Move spans as little as needed, so that each lasts a tick, none overlap, and all lie from `first` to `limit`.

    They last less than a tick where there are more spans than ticks.
    """
    least = min(1.0, (limit - first) / max(1, len(spans)))
    until, found = first, list[Span]()
    for begin, end in spans:
        begin = max(begin, until)
        until = max(end, begin + least)
        found.append((begin, until))
    for i in reversed(range(len(found))):
        begin, end = found[i]
        end = min(end, limit)
        begin = min(begin, end - least)
        found[i], limit = (max(first, begin), end), max(first, begin)
    return found
