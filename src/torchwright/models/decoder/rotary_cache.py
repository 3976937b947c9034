"""Angles of the rotary embeddings of a batch: computed once for each rotary embedding of a stack's layers."""

from __future__ import annotations

import torch

from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.rope import BY_LENGTH, RotaryTable

RotaryAngles = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Cosines and sines (rows, R/2) and each token's row."""


class RotaryCache:
    """The rotary embeddings of a stack's layers, each of which is computed once for a batch."""

    def __init__(self, config: DecoderConfig) -> None:
        distinct = list(dict.fromkeys(rope for rope in config.ropes if rope))
        self._rotary = [RotaryTable(rope, config.context) for rope in distinct]
        self.of_layer = [distinct.index(rope) if rope else len(distinct) for rope in config.ropes]
        """Each layer's index among the rotary embeddings; the last is for layers without positions."""

    def __call__(self, batch: Batch) -> list[RotaryAngles]:
        """Return the angles of each rotary embedding, and last those of layers without positions."""
        still = torch.empty(batch.longest, 0, device=batch.positions_T.device)
        return [*(rotary(batch) for rotary in self._rotary), (still, still, batch.positions_T)]

    def by_layer(self, batch: Batch) -> list[RotaryAngles]:
        """Return the angles of each layer."""
        angles = self(batch)
        return [angles[place] for place in self.of_layer]

    @property
    def by_length(self) -> bool:
        """Check whether a position's angles depend on the length of its sequence in some layer."""
        return any(rotary.rope.kind in BY_LENGTH for rotary in self._rotary)

    def table(self, layer: int, longest: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of a layer for at least `longest` positions."""
        place = self.of_layer[layer]
        if place == len(self._rotary):
            still = torch.empty(longest, 0, device=device)
            return still, still
        return self._rotary[place].rows(longest, device)
