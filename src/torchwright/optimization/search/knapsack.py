"""Which layers to change and which to leave alone: the knapsack problem of an error that adds up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STEPS, STEPS_A_LAYER = 2000, 50
"""Equal parts of the room, at least, and for each layer: an error is rounded up to whole ones, so that what is packed
fits, and rounding takes a fiftieth of the room at most."""


def packed(values: Sequence[float], weights: Sequence[float], room: float) -> list[bool]:
    """Say which things have the largest value together, of those whose weights fit the room.

    Values and weights are not negative. Solved by dynamic programming, to within a fiftieth of the room.
    """
    if room <= 0:
        return [weight <= 0 for weight in weights]
    steps = max(STEPS, STEPS_A_LAYER * len(weights))
    sizes = [int(np.ceil(min(weight / room, 2.0) * steps)) for weight in weights]
    best, taken = np.zeros(steps + 1), np.zeros((len(values), steps + 1), bool)
    for thing, (value, size) in enumerate(zip(values, sizes, strict=True)):
        if size > steps:
            continue
        with_it = best[: steps + 1 - size] + value
        taken[thing, size:] = with_it > best[size:]
        best[size:] = np.maximum(best[size:], with_it)
    chosen, left = [False] * len(values), steps
    for thing in reversed(range(len(values))):
        if taken[thing, left]:
            chosen[thing], left = True, left - sizes[thing]
    return chosen
