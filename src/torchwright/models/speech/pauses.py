"""Pause detection by energy: places at which a long recording can be cut into independent parts.

Without a pause a part goes on, and its windows follow each other as in the whole recording: a missed pause costs time,
but no word.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchwright.models.speech.sound import RATE, Sound

FRAME = RATE // 50
"""Samples whose energy is one number: 20 ms."""
PAUSE = 15
"""Frames of a pause at least: 0.3 s, longer than any consonant holds the breath."""
QUIET = 0.05
"""Threshold relative to the amplitude of the loud frames: 26 dB below."""
SILENCE = 0.0005
"""Threshold relative to full scale (−66 dB): sound that is nowhere louder is skipped."""
LONGEST = 10
"""Windows of a part at most; one that has no pause for so long is cut at its quietest place."""


def parts(sound: Sound, window: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first sample, samples) of consecutive parts; silent parts come separately.

    A part ends in its last pause before `window` samples, otherwise in the first one after.
    """
    begin = 0
    while len(samples := sound.window(begin, window)):
        end = _silence(samples) or _end(sound, begin, window)
        yield begin, sound.window(begin, end)
        begin += end


def is_silent(samples: np.ndarray) -> bool:
    """Check whether the samples are silent."""
    return _silence(samples) == len(samples)


def _silence(samples: np.ndarray) -> int:
    """Samples at the beginning in which nothing is; 0 where they are so few that they only lead to what follows."""
    loud = levels(samples) > SILENCE
    if not loud.any():
        return len(samples)
    lead = int(loud.argmax())
    return FRAME * (lead - PAUSE // 2) if lead >= 2 * PAUSE else 0


def _end(sound: Sound, begin: int, window: int) -> int:
    """Return the length in samples of a part that begins with sound."""
    for windows in range(1, LONGEST + 1):
        samples = sound.window(begin, windows * window)
        ended = len(samples) < windows * window
        if ended and windows == 1:
            break
        places = pauses(samples)
        if len(places):
            return int(places[-1] if windows == 1 else places[0])
        if ended:
            break
    else:
        return len(samples) - window + FRAME * int(levels(samples[-window:]).argmin())
    return len(samples)


def pauses(samples: np.ndarray) -> np.ndarray:
    """Return the middles of the pauses, in samples, except for one at the very beginning."""
    quiet = ~loud_frames(samples)
    runs = np.flatnonzero(np.diff(quiet.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    runs = runs[(runs[:, 1] - runs[:, 0] >= PAUSE) & (runs[:, 0] > 0)]
    return FRAME * runs.sum(1) // 2


def loud_frames(samples: np.ndarray) -> np.ndarray:
    """Return which frames are loud, compared with the loudest ones."""
    found = levels(samples)
    return found >= max(SILENCE, QUIET * float(np.quantile(found, 0.95)))


def levels(samples: np.ndarray) -> np.ndarray:
    """Root mean squares of the frames, the last one filled up with zeros."""
    frames = np.pad(samples, (0, -len(samples) % FRAME)).reshape(-1, FRAME)
    return np.sqrt(np.square(frames, dtype=np.float64).mean(1))
