"""The share of proposals that were accepted, by confidence, from which it is decided how many are proposed."""

from __future__ import annotations

from collections.abc import Sequence

CLASSES = 10
"""Classes of a draft's confidence, equally wide."""
PRIOR = 8.0
"""Proposals that a class's own confidence counts as, before any was verified."""
MEMORY = 512.0
"""Proposals of a class after which the older ones count half."""


class Acceptance:
    """The share of proposals that were accepted, by the confidence that the draft had in them."""

    def __init__(self) -> None:
        self._accepted = [PRIOR * _middle(place) for place in range(CLASSES)]
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

    def forget(self, confidence: float) -> None:
        """Count a proposal that was left out, because it is hardly ever right: what was learned fades.

        So after some 60 of its class one is verified again, in case that the text has changed.
        """
        place = class_of(confidence)
        for counts, prior in ((self._offered, PRIOR), (self._accepted, PRIOR * _middle(place))):
            counts[place] += (prior - counts[place]) / MEMORY


def _middle(place: int) -> float:
    return (place + 0.5) / CLASSES


def class_of(confidence: float, classes: int = CLASSES) -> int:
    """Return the class of a confidence among so many equally wide ones."""
    return min(classes - 1, max(0, int(confidence * classes)))
