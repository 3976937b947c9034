"""Positions of a sequence with pictures: each token of a picture has one in time, in height and in width.

A video's positions in time may go beyond the prompt's length: they follow its seconds, whatever its tokens are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torchwright.core.errors import WorkloadError

AXES = 3
"""Time, height and width."""


@dataclass(frozen=True)
class PromptAxes:
    """Positions of a prompt's tokens by axis; an answer's follow the largest one."""

    of_prompt_AP: np.ndarray
    """int64."""

    @property
    def shift(self) -> int:
        """The number that turns the place of an answer's token into its position."""
        count = self.of_prompt_AP.shape[1]
        return int(self.of_prompt_AP.max()) + 1 - count if count else 0

    def check(self, tokens: int, context: int) -> None:
        """Raise `WorkloadError` where a sequence of so many tokens has positions beyond the context.

        Tables of angles are as long as the largest position, which a file's frame rate decides.
        """
        largest = max(int(self.of_prompt_AP.max(initial=0)), tokens + self.shift - 1)
        if largest >= context:
            raise WorkloadError(
                "the prompt's pictures and videos reach beyond the model's context",
                found=f"position {largest:,}",
                allowed=f"{context:,} positions",
                next="send a shorter video, or fewer pictures",
            )

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
