"""Mix channels to one, unless they cancel each other."""

from __future__ import annotations

import numpy as np

CANCELLED = 0.05
"""Share of the channels' mean power that is left when they are mixed. Unrelated channels keep half, and only channels
of opposite phase keep less than a twentieth (a correlation below −0.9)."""
NOTICE = "its channels cancel each other (opposite phase), so the loudest one is used in place of their mean"


class Mono:
    """Blocks (T, C) of one file to mono (T,): the channels' mean, or the loudest channel where the mean cancels."""

    def __init__(self) -> None:
        self.notices = list[str]()
        """Sentences for the user, added when they are found."""

    def __call__(self, block_TC: np.ndarray) -> np.ndarray:
        mixed_T = block_TC.mean(1)
        if block_TC.shape[1] == 1:
            return mixed_T
        powers_C = np.square(block_TC, dtype=np.float64).mean(0)
        if np.square(mixed_T, dtype=np.float64).mean() >= CANCELLED * powers_C[powers_C > 0].sum() / len(
            powers_C
        ):
            return mixed_T
        if NOTICE not in self.notices:
            self.notices.append(NOTICE)
        return block_TC[:, int(powers_C.argmax())]
