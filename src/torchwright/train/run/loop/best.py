"""The best validation loss of a run, and the warning that the model begins to memorize (no torch)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

RISES = 2
"""Evaluations in a row above the best before it is a warning: one may be noise."""
MARGIN = 0.01
"""Share of the best loss by which another must exceed it to count as having risen."""
SMOOTHING = 0.9
"""The weight of the past in the training loss: one batch says little."""


@dataclass(kw_only=True)
class Best:
    """Judges each validation loss by those before."""

    loss: float = math.inf
    step: int = 0
    _trained: float | None = None
    _trained_at_best: float = math.inf
    _rises: int = 0
    _warned: bool = False

    def trained(self, loss: float) -> None:
        """Note the training loss of a step."""
        self._trained = loss if self._trained is None else SMOOTHING * self._trained + (1 - SMOOTHING) * loss

    def judge(self, step: int, loss: float) -> str | None:
        """Take the validation loss after a step; return a warning where losses part for the first time."""
        if loss < self.loss:
            self.loss, self.step, self._rises = loss, step, 0
            self._trained_at_best = math.inf if self._trained is None else self._trained
            return None
        self._rises = self._rises + 1 if loss > self.loss * (1 + MARGIN) else 0
        falls = self._trained is not None and self._trained < self._trained_at_best
        if self._rises < RISES or self._warned or not falls:
            return None
        self._warned = True
        return (
            f"the validation loss has risen from {self.loss:.4f} at step {self.step} to {loss:.4f} while the training "
            "loss falls: the model begins to memorize"
        )

    def recall(self, figures: Iterable[tuple[int, float | None, float | None]]) -> None:
        """Take the figures of a run that goes on: (step, training loss, validation loss) in their order."""
        for step, trained, validation in figures:
            if trained is not None:
                self.trained(trained)
            if validation is not None:
                self.judge(step, validation)
