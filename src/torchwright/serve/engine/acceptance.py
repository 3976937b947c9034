"""Measured figures that decide how many tokens are proposed: acceptance by confidence, and what rows cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

CLASSES = 10
"""Classes of a draft's confidence, equally wide."""
PRIOR = 8.0
"""Proposals that a class's own confidence counts as, before any was verified."""
MEMORY = 512.0
"""Proposals of a class after which the older ones count half."""


class Acceptance:
    """The share of proposals that were accepted, by the confidence that the draft had in them."""

    def __init__(self) -> None:
        middle = [(place + 0.5) / CLASSES for place in range(CLASSES)]
        self._accepted = [PRIOR * share for share in middle]
        self._offered = [PRIOR] * CLASSES

    def of(self, confidence: float) -> float:
        """Return the expected acceptance of a proposal, given that those before it are accepted."""
        place = class_of(confidence)
        return self._accepted[place] / self._offered[place]

    def table(self) -> list[float]:
        """Return the expected acceptance of each class, and last the mean."""
        shares = [accepted / offered for accepted, offered in zip(self._accepted, self._offered, strict=True)]
        return [*shares, self.mean]

    @property
    def mean(self) -> float:
        """Return the acceptance of all proposals so far."""
        return sum(self._accepted) / sum(self._offered)

    def learn(self, confidences: Sequence[float], accepted: int) -> None:
        """Count a verified chain: the first `accepted` proposals were right; the one behind them, if any, was not."""
        for index, confidence in enumerate(confidences[: accepted + 1]):
            place = class_of(confidence)
            self._offered[place] += 1
            self._accepted[place] += index < accepted
            if self._offered[place] > MEMORY:
                self._offered[place] /= 2
                self._accepted[place] /= 2


def class_of(confidence: float, classes: int = CLASSES) -> int:
    """Return the class of a confidence among so many equally wide ones."""
    return min(classes - 1, max(0, int(confidence * classes)))


@dataclass(frozen=True)
class RowCosts:
    """Seconds of a forward call by its rows, as measured for a few numbers of rows."""

    rows: Sequence[int]
    """Ascending, from 1."""
    seconds: Sequence[float]

    @classmethod
    def rising(cls, rows: Sequence[int], seconds: Sequence[float]) -> RowCosts:
        """Take measured seconds, of which none is more than those of more rows: only noise says that it is."""
        least = accumulate(reversed(seconds), min)
        return cls(rows, list(least)[::-1])

    def __call__(self, rows: float) -> float:
        """Return the seconds of a call, on the line through the two measured numbers of rows next to it."""
        if len(self.rows) == 1:
            return self.seconds[0] * rows / self.rows[0]
        right = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        left = right - 1
        slope = (self.seconds[right] - self.seconds[left]) / (self.rows[right] - self.rows[left])
        return max(1e-9, self.seconds[left] + slope * (rows - self.rows[left]))
