"""The memory of a decoder: keys and values of an encoder's states, written once (cross-attention).

memory = Memory(decoder, pages=94, dtype=torch.bfloat16)
sequence = memory.write(states_SE)              keys and values of every layer, packed in pages
batch = replace(batch, memory=memory.of([sequence, …]))
memory.free(sequence)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from torchwright.hardware.kernels import reference
from torchwright.models.decoder.batch import Remembered
from torchwright.models.decoder.cache import CacheSequence, PagedCache
from torchwright.models.decoder.layers import Layer
from torchwright.models.decoder.model import Decoder


class Memory:
    """Room in pages for the memories of several sequences of one decoder."""

    def __init__(self, decoder: Decoder, *, pages: int, dtype: torch.dtype) -> None:
        self._layers = [cast(Layer, layer).memory for layer in decoder.layers]
        self._cache = PagedCache(decoder.config, pages=pages, dtype=dtype, device=decoder.embedding.device)

    def write(self, states_SE: torch.Tensor) -> CacheSequence:
        """Store what all layers will read of an encoder's states; raises `CacheFull` where no page is free."""
        count = len(states_SE)
        sequence = self._cache.sequence(count)
        batch = self._cache.append([(sequence, range(count))])
        still = torch.empty(count, 0, device=states_SE.device)
        for layer, pages in zip(self._layers, self._cache.layers, strict=True):
            assert layer is not None, "this decoder has no memory"
            layer.write(states_SE, batch, (still, still, batch.positions_T), pages)
        return sequence

    def of(self, sequences: Sequence[CacheSequence]) -> Remembered:
        """Return the memory of each sequence of a batch."""
        tables_BP = np.zeros((len(sequences), max(len(sequence.pages) for sequence in sequences)), np.int32)
        for row, sequence in enumerate(sequences):
            tables_BP[row, : len(sequence.pages)] = sequence.pages
        lengths = np.array([sequence.length for sequence in sequences], np.int32)
        device = self._cache.device
        return Remembered(
            self._cache.layers, torch.from_numpy(tables_BP).to(device), torch.from_numpy(lengths).to(device)
        )

    def keys(self, layer: int, sequence: CacheSequence) -> torch.Tensor:
        """Return a layer's keys (K, S, D) as they lie in their pages."""
        pages, table_P = self._cache.layers[layer], torch.tensor(sequence.pages, device=self._cache.device)
        return reference.load_keys(pages.k, pages.k_scale, table_P)[:, : sequence.length]

    def check_integrity(self, sequences: Sequence[CacheSequence]) -> None:
        """Raise `AssertionError` unless every page is held by exactly these."""
        self._cache.pool.check_integrity([list(sequence.pages) for sequence in sequences])

    def free(self, sequence: CacheSequence) -> None:
        """Give the sequence's pages back."""
        self._cache.free(sequence)
