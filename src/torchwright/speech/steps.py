"""An encoder-decoder of transformers, token by token over one encoded window, with transformers' own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache


class Steps:
    """The decoder over one window; what it has read stays in its cache."""

    def __init__(self, model: Any, states_1SE: torch.Tensor) -> None:
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        self._states_1SE = states_1SE
        self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """The decoder's output (T, E) after more tokens."""
        out = self._decoder(
            input_ids=torch.tensor([list(ids)]),
            encoder_hidden_states=self._states_1SE,
            past_key_values=self._cache,
            use_cache=True,
        )
        return out.last_hidden_state[0]

    def logits(self, hidden_E: torch.Tensor) -> torch.Tensor:
        """Logits (V,) in float32 of what follows one output."""
        return self._head(hidden_E).float()
