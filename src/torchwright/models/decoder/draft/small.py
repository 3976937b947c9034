"""A small language model with the decoder's own tokens, as a draft."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import LayerCache
from torchwright.models.decoder.draft.draft import Draft, Likeliest, likeliest
from torchwright.models.decoder.model import Decoder


class SmallDraft(Draft):
    """A decoder whose keys and values lie in another one's pages."""

    kind: ClassVar[str] = "draft model"
    lag: ClassVar[int] = 0

    def __init__(self, decoder: Decoder, tokens: int) -> None:
        """`tokens`: how many of its tokens the other decoder knows; rows of padding may follow in either."""
        super().__init__()
        self.decoder, self.page_shapes, self._tokens = decoder, decoder.config.page_shapes, tokens

    def forward(self, batch: Batch, states_TX: torch.Tensor | None, pages: LayerCache) -> torch.Tensor:
        """See `Draft`."""
        known_T = batch.ids_T.clamp(max=self.decoder.config.vocabulary - 1)
        return self.decoder(replace(batch, ids_T=known_T), pages)

    def likeliest(self, hidden_NE: torch.Tensor, count: int) -> Likeliest:
        """See `Draft`."""
        return likeliest(self.decoder.logits(hidden_NE)[:, : self._tokens], count)
