"""The decoder: embedding, layers, final norm, output layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.decoder.batch import Batch
from torchwright.decoder.cache import PagedCache
from torchwright.decoder.config import DecoderConfig
from torchwright.decoder.layers import Layer, Turn, join
from torchwright.decoder.plan import MOST_ROWS, DecodePlan, plans
from torchwright.decoder.rope import Rotary
from torchwright.decoder.weights import DecoderParts


class Decoder(nn.Module):
    """A decoder-only transformer over ragged batches and a paged cache.

    batch = cache.append([(sequence, ids), …])
    hidden_TE = decoder(batch, cache)
    logits_BV = decoder.logits(hidden_TE[batch.last_rows_B])
    """

    embedding: torch.Tensor
    norm: torch.Tensor

    def __init__(self, config: DecoderConfig, weights: DecoderParts) -> None:
        super().__init__()
        self.config = config
        embedding_VE = weights.embedding()
        self.register_buffer("embedding", embedding_VE.to(weights.device))
        # Gemma scales by the factor as the model's dtype rounds it.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=embedding_VE.dtype).item()
        self.layers = nn.ModuleList()
        for layer in range(config.layers):
            self.layers.append(Layer(config, weights, layer).to(weights.device))
            weights.release()
        self.register_buffer("norm", weights.final_norm().to(weights.device))
        self.head = weights.head(embedding_VE).to(weights.device)
        weights.release()
        distinct = list(dict.fromkeys(rope for rope in config.ropes if rope))
        self._rotary = [Rotary(rope, config.context) for rope in distinct]
        # Each layer's place among the turns of a forward call; the last is for layers without positions.
        self._turn_of = [distinct.index(rope) if rope else len(distinct) for rope in config.ropes]

    def forward(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        """Hidden states (T, E) after the final norm; writes the tokens' keys and values into the cache."""
        stream_TE = F.embedding(batch.ids_T, self.embedding)
        if self.embedding_scale != 1:
            stream_TE = stream_TE * self.embedding_scale
        still = torch.empty(batch.longest, 0, device=batch.positions_T.device)
        turns: list[Turn] = [rotary(batch) for rotary in self._rotary]
        turns.append((still, still, batch.positions_T))
        if len(batch.ids_T) <= MOST_ROWS and (plan := self._plan(cache)):
            return plan(stream_TE, turns, batch)
        delta_TE = None
        for layer, turn, pages in zip(self.layers, self._turn_of, cache.layers, strict=True):
            delta_TE, stream_TE = layer(delta_TE, stream_TE, batch, turns[turn], pages)
        return join(delta_TE, stream_TE, self.norm, self.config.eps)[0]

    def _plan(self, cache: PagedCache) -> DecodePlan | None:
        """All layers as one operator, None where they have to be called."""
        plan = plans.get(cache)
        if plan is None or not plan.holds(self.layers):
            dtype = self.embedding.dtype
            plan = DecodePlan(self.layers, self._turn_of, self.norm, self.config, dtype, cache)
            plans[cache] = plan
        return None if plan.unplanned or plan.watched else plan

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Logits (N, V) in float32 of hidden states (N, E)."""
        config = self.config
        logits_NV = self.head(hidden_NE).float()
        if config.logit_scale != 1:
            logits_NV = logits_NV * config.logit_scale
        if config.logit_soft_cap:
            logits_NV = torch.tanh(logits_NV / config.logit_soft_cap) * config.logit_soft_cap
        return logits_NV
