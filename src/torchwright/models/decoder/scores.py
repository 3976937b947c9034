"""Logits as tokens are chosen from: rows of a whole vocabulary, of which few numbers are ever looked at.

The output layer also returns the largest of each panel where that costs nothing. Then the most likely
token, or the k most likely, are found without a pass over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch

from torchwright.hardware.kernels.pack import PANEL


@dataclass(frozen=True)
class Logits:
    """The logits of N rows, float32."""

    values_NV: torch.Tensor
    peaks_NP: torch.Tensor | None = None
    """The largest of each `PANEL` neighbours, NaN where one is, on the CPU; None where they are not known."""
    places: Mapping[int, int] | None = None
    """Row → its place in `values_NV`, where some rows alone were fetched from a device."""

    def fetched(self, rows: Sequence[int]) -> Logits:
        """Return the logits with these rows on the CPU, in one transfer; the others cannot be asked for any more.

        A row of a large vocabulary takes longer to transfer than a device takes to find its largest.
        """
        if self.values_NV.device.type == "cpu":
            return self
        if list(rows) == list(range(len(self.values_NV))):
            return Logits(self.values_NV.cpu())
        index_N = torch.tensor(list(rows), dtype=torch.int64, device=self.values_NV.device)
        places = {row: place for place, row in enumerate(rows)}
        return Logits(self.values_NV[index_N].cpu(), places=places)

    def row(self, row: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One row and its peaks."""
        place = row if self.places is None else self.places[row]
        return self.values_NV[place], None if self.peaks_NP is None else self.peaks_NP[place]

    def leading(self) -> torch.Tensor:
        """Return each row's first largest on the device of the logits, -1 where that is not a finite number."""
        peak_N, token_N = self.values_NV.max(-1)
        return torch.where(peak_N.isfinite(), token_N, -1)

    def best(self) -> list[int | None]:
        """Each row's first largest, None where that is not a finite number."""
        if self.values_NV.device.type != "cpu":
            return tokens_of(self.leading().tolist())
        peaks: Any = repeat(None) if self.peaks_NP is None else self.peaks_NP.numpy()
        found = []
        for values_V, peaks_P in zip(self.values_NV.numpy(), peaks, strict=False):
            token = Scores(values_V, peaks_P).argmax()
            found.append(token if math.isfinite(values_V[token]) else None)
        return found


def tokens_of(leading: Sequence[int]) -> list[int | None]:
    """Return the tokens of `Logits.leading`, None for -1."""
    return [None if token < 0 else token for token in leading]


@dataclass(frozen=True)
class Scores:
    """One row; the same answers with and without `peaks_P`."""

    values_V: np.ndarray
    peaks_P: np.ndarray | None = None

    def argmax(self) -> int:
        """The first of the largest, or the first that is NaN."""
        if self.peaks_P is None:
            return int(self.values_V.argmax())
        start = int(self.peaks_P.argmax()) * PANEL
        return start + int(self.values_V[start : start + PANEL].argmax())

    def top(self, count: int) -> np.ndarray:
        """Places, in order, of the `count` largest and those that tie with the last; none may be NaN."""
        places, values = self._near(count)
        chosen = values >= np.partition(values, -count)[-count]
        return chosen.nonzero()[0] if places is None else places[chosen]

    def _near(self, count: int) -> tuple[np.ndarray | None, np.ndarray]:
        """Places (None for all) that hold the `count` largest among others, and what is there."""
        peaks_P = self.peaks_P
        if peaks_P is None or count >= len(peaks_P):
            return None, self.values_V
        panels = (peaks_P >= np.partition(peaks_P, -count)[-count]).nonzero()[0]
        places = (panels[:, None] * PANEL + np.arange(PANEL)).ravel()
        places = places[: np.searchsorted(places, len(self.values_V))]
        return places, self.values_V[places]
