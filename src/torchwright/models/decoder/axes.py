"""Positions of a sequence with pictures: each token of a picture has one in time, in height and in width."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

AXES = 3
"""Time, height and width."""


@dataclass(frozen=True)
class PromptAxes:
    """Positions of a prompt's tokens by axis; an answer's follow the largest one."""

    of_prompt_AP: np.ndarray
    """int64."""

    def __post_init__(self) -> None:
        count = self.of_prompt_AP.shape[1]
        # The tables of angles are as long as the longest sequence.
        assert not count or self.of_prompt_AP.max() < count, "a position beyond the prompt's length"

    @property
    def shift(self) -> int:
        """The number that turns the place of an answer's token into its position."""
        count = self.of_prompt_AP.shape[1]
        return int(self.of_prompt_AP.max()) + 1 - count if count else 0

    def at(self, places: range) -> np.ndarray:
        """Return the positions (3, n) of the tokens at these places."""
        count = self.of_prompt_AP.shape[1]
        answer = np.arange(max(places.start, count), places.stop) + self.shift
        prompt_An = self.of_prompt_AP[:, places.start : places.stop]
        return np.concatenate([prompt_An, np.broadcast_to(answer, (AXES, len(answer)))], axis=1)


def axes_of_batch(pieces: Iterable[tuple[PromptAxes | None, range]]) -> np.ndarray | None:
    """Return the positions (3, T) of these places of sequences, None where all of them are of text."""
    found = list(pieces)
    if all(axes is None for axes, _ in found):
        return None
    return np.concatenate(
        [
            np.broadcast_to(np.arange(places.start, places.stop), (AXES, len(places)))
            if axes is None
            else axes.at(places)
            for axes, places in found
        ],
        axis=1,
    )
