"""Length and cuts of Moonshine's windows, and the number of encoder states of a window. No torch here."""

from __future__ import annotations

import numpy as np

from torchwright.models.speech.sound import RATE

LONGEST, SHORTEST = 24 * RATE, 16 * RATE
"""Samples of a window: the cut is made at the quietest place between the two."""
LEAST = RATE // 2
"""Shorter windows get silence behind them."""
CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))
"""(kernel, stride) of what a sound goes through first."""
QUIET = RATE // 10
"""A place is quiet over a tenth of a second."""


def states(samples: int) -> int:
    """Return the number of encoder states for so many samples: three convolutions without padding."""
    for kernel, stride in CONVOLUTIONS:
        samples = (samples - kernel) // stride + 1
    return samples


def quietest(samples: np.ndarray) -> int:
    """The middle of the quietest tenth of a second between the shortest and the longest window."""
    energy = np.cumsum(np.pad(np.square(samples[SHORTEST:], dtype=np.float64), (1, 0)))
    return SHORTEST + int((energy[QUIET:] - energy[:-QUIET]).argmin()) + QUIET // 2
