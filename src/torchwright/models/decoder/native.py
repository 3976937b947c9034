"""A decoder in the place of a language workload's model: the two calls `prefill` and `decode` on a paged cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchwright.models.decoder.cache import CacheSequence, PagedCache
from torchwright.models.decoder.generation.generate import LoadedDecoder
from torchwright.models.decoder.packed import read_packed, write_packed


class NativeModel(nn.Module):
    """Called like `StaticCacheModel`: writes T tokens after the first slot and returns logits (B, K, V).

    Keys and values stay in pages of its own, one sequence for each row and one set of them for each dense cache that
    callers pass. Of a call's arguments it needs the ids, the first slot and the rows to keep; positions and masks
    follow from these.
    """

    def __init__(self, loaded: LoadedDecoder) -> None:
        super().__init__()
        self.loaded, self.decoder = loaded, loaded.decoder
        self._pages_of = WeakTensorKeyDictionary()  # they go when the caller's own cache does

    @classmethod
    def load(cls, folder: Path, model_folder: Path, device: str = "cpu") -> Self:
        """Load what `save` wrote, for the device that it was packed for."""
        return cls(read_packed(folder, model_folder, device))

    def save(self, folder: Path) -> None:
        write_packed(self.loaded, folder)

    def forward(self, ids_BT, positions_BT, slots_T, keep_K, masks, cache) -> torch.Tensor:
        start, rows = int(slots_T[0]), ids_BT.tolist()
        pages, sequences = self._pages(cache[0])
        for sequence in sequences:
            # The length that turns a token is that of its call, as in transformers.
            sequence.prompt_tokens = start + ids_BT.shape[1]
            if sequence.length < start:  # a call timed by itself: what came before is zeros
                pages.append([(sequence, [0] * (start - sequence.length))])
            pages.rewind(sequence, start)
            pages.mark_here(sequence)  # the same call may come again, to be timed
        batch = pages.append(list(zip(sequences, rows, strict=True)))
        B, T = ids_BT.shape
        rows_BK = torch.arange(B, device=keep_K.device)[:, None] * T + keep_K
        with self.loaded.on_threads():
            logits = self.decoder.answer(batch, pages, rows_BK.flatten())
        return logits.values_NV.unflatten(0, rows_BK.shape)

    def _pages(self, keys_BKSD: torch.Tensor) -> tuple[PagedCache, list[CacheSequence]]:
        """Those of the caller whose first layer's dense keys these are."""
        known: Any = self._pages_of.get(keys_BKSD)
        if known is None or known[0].dtype != self.loaded.kv_dtype:
            rows, slots = len(keys_BKSD), keys_BKSD.shape[2]
            pages = self.loaded.new_cache([slots] * rows, copies=rows)
            known = pages, [pages.sequence(0) for _ in range(rows)]
            self._pages_of[keys_BKSD] = known
        return known
