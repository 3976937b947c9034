"""A small language model with the decoder's own tokens, as a draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import LayerCache
from torchwright.models.decoder.draft.draft import Draft, Likeliest, likeliest
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.plan import described
from torchwright.models.decoder.program import Program, no_kernels, not_packed


class SmallDraft(Draft):
    """A decoder whose keys and values lie in another one's pages."""

    kind: ClassVar[str] = "draft model"
    lag: ClassVar[int] = 0

    def __init__(self, decoder: Decoder, vocabulary: int) -> None:
        """`vocabulary`: that of the other decoder; rows of padding may follow the common tokens in either."""
        super().__init__()
        self.decoder, self.page_shapes = decoder, decoder.config.page_shapes
        self._vocabulary, self._tokens = vocabulary, min(vocabulary, decoder.config.vocabulary)
        self.width = decoder.config.model

    def forward(self, batch: Batch, states_TX: torch.Tensor | None, pages: LayerCache) -> torch.Tensor:
        """See `Draft`."""
        known_T = batch.ids_T.clamp(max=self.decoder.config.vocabulary - 1)
        return self.decoder(replace(batch, ids_T=known_T), pages)

    @property
    def unplanned(self) -> str | None:
        """See `Draft`."""
        decoder, config = self.decoder, self.decoder.config
        if decoder.rotary.by_length or len({*decoder.rotary.of_layer}) > 1 or decoder.positions is not None:
            return "positions other than those of one rotary embedding"
        if config.logit_scale != 1 or config.logit_soft_cap:
            return "logits that are scaled or capped"
        if self._vocabulary != config.vocabulary:
            return "a vocabulary with other padding"
        if decoder.embedding_norm is not None or config.state_shapes:
            return "a norm behind the embedding, or layers with a state"
        return no_kernels(decoder.embedding) or not_packed(decoder.head) or self._unplanned_layers

    def program(self, pages: LayerCache, *, observes: bool) -> Program:
        """See `Draft`; it reads tokens alone."""
        decoder = self.decoder
        program, out = described(decoder.step_modules(), decoder.config, decoder.kept(pages))
        program.carry(out, torch.arange(self._tokens))
        return program

    def angles(self, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Draft`."""
        return self.decoder.rotary.table(0, longest, self.decoder.embedding.device)

    @property
    def _unplanned_layers(self) -> str | None:
        inputs = self.decoder.inputs
        if inputs is not None:
            return "inputs of each layer"
        layers: list[Any] = list(self.decoder.layers)
        return next((layer.unplanned for layer in layers if layer.unplanned), None)

    def likeliest(self, hidden_NE: torch.Tensor, count: int) -> Likeliest:
        """See `Draft`."""
        return likeliest(self.decoder.logits(hidden_NE)[:, : self._tokens], count)
