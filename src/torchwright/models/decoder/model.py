"""The decoder: embedding, layers, final norm, output layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.hardware.kernels import ops
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import LayerCache, PagedCache
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.layer_inputs import TokenInputs
from torchwright.models.decoder.layers import join
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.models.decoder.pages import LayerPages
from torchwright.models.decoder.plan import MOST_ROWS, DecodePlan, Kept, StepModules, plans
from torchwright.models.decoder.post_norm import embedding_norm, layer_of
from torchwright.models.decoder.recorded import RecordedSteps, recordable, steps
from torchwright.models.decoder.rotary_cache import RotaryCache
from torchwright.models.decoder.scores import Logits
from torchwright.models.decoder.shared import shape_logits
from torchwright.models.decoder.weights import DecoderParts


class Decoder(PagedModel):
    """A decoder-only transformer over ragged batches and a paged cache.

    batch = cache.append([(sequence, ids), …])
    logits_BV = decoder.answer(batch, cache, batch.last_rows_B).values_NV
    """

    config: DecoderConfig
    placeholders: torch.Tensor | None
    positions: torch.Tensor | None
    norm: torch.Tensor | None

    def __init__(self, config: DecoderConfig, weights: DecoderParts) -> None:
        super().__init__()
        self.config = config
        embedding_VE = weights.embedding()
        self.register_buffer("embedding", embedding_VE.to(weights.device))
        # Gemma scales by the factor as the model's dtype rounds it.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=embedding_VE.dtype).item()
        tokens = torch.tensor(config.placeholders, device=weights.device) if config.placeholders else None
        self.register_buffer("placeholders", tokens, persistent=False)
        self.register_buffer("positions", weights.positions())
        self.embedding_norm = embedding_norm(config, weights)
        has_inputs = config.layer_inputs is not None and config.layer_inputs.width > 0
        self.inputs = TokenInputs(config, weights).to(weights.device) if has_inputs else None
        self.layers = nn.ModuleList()
        for layer in range(config.layers):
            self.layers.append(layer_of(config, weights, layer).to(weights.device))
            weights.release()
        norm_E = weights.final_norm()
        self.register_buffer("norm", None if norm_E is None else norm_E.to(weights.device))
        self.head = weights.head(embedding_VE).to(weights.device)
        weights.release()
        self.rotary = RotaryCache(config)
        self.ways = 1
        """Processes that compute it together, each on a part of the weights (`tensor_parallel/`)."""

    @property
    def on_kernels(self) -> bool:
        linear = any(isinstance(module, nn.Linear) for module in self.modules())
        return not linear and ops.on(self.embedding.device, self.embedding.dtype) is ops.native

    def forward(self, batch: Batch, cache: LayerCache) -> torch.Tensor:
        """Hidden states (T, E) after the final norm; writes the tokens' keys and values into the cache."""
        if plan := self._plan(batch, cache):
            return plan.hidden(self.rotary(batch), batch)
        ids_T = batch.ids_T
        if self.placeholders is not None:
            ids_T = ids_T.masked_fill(torch.isin(ids_T, self.placeholders), self.config.padding)
        stream_TE = F.embedding(ids_T, self.embedding)
        if self.embedding_scale != 1:
            stream_TE = stream_TE * self.embedding_scale
        if batch.pictures is not None:
            stream_TE = stream_TE.index_copy(
                0, batch.pictures.rows_N, batch.pictures.embeddings_NE.to(stream_TE.dtype)
            )
        if self.positions is not None:
            stream_TE = stream_TE + F.embedding(batch.positions_T, self.positions)
        if self.embedding_norm is not None:
            stream_TE = self.embedding_norm(stream_TE)
        if self.inputs is not None:
            batch = replace(batch, inputs_TLI=self.inputs(ids_T, stream_TE))
        delta_TE = None
        deep = iter(batch.pictures.deep if batch.pictures else ())
        for index, (layer, angles, kept) in enumerate(
            zip(self.layers, self.rotary.by_layer(batch), self.kept(cache), strict=True)
        ):
            if batch.features is not None:
                batch.features.note(index, delta_TE, stream_TE)
            delta_TE, stream_TE = layer(delta_TE, stream_TE, batch, angles, kept)
            if batch.pictures and (more_NE := next(deep, None)) is not None:
                stream_TE = stream_TE.index_add(0, batch.pictures.rows_N, more_NE.to(stream_TE.dtype))
        out_TE, _ = join(delta_TE, stream_TE, self.norm, self.config.eps)
        if batch.features is not None:
            batch.features.note(self.config.layers, None, out_TE)
        return out_TE

    def answer(self, batch: Batch, cache: PagedCache, rows_N: torch.Tensor) -> Logits:
        """`forward`, then `logits` of these rows (int64): a step is one operator where a plan describes it, and one
        launch where it was recorded."""
        plan = self._plan(batch, cache)
        if plan is None or not plan.answers:
            recorded_TV = self._recorded(batch, cache)
            return Logits(
                self.logits(self(batch, cache)[rows_N]) if recorded_TV is None else recorded_TV[rows_N]
            )
        values_NV, peaks_NP = plan.logits(self.rotary(batch), batch, rows_N)
        return Logits(values_NV, peaks_NP) if self._plain else Logits(shape_logits(self.config, values_NV))

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Logits (N, V) in float32 of hidden states (N, E)."""
        return shape_logits(self.config, self.head(hidden_NE).float())

    def step_modules(self, memory: Sequence[LayerPages] | None = None) -> StepModules:
        """Return the parts that a step computes with, for its plan."""
        return StepModules(
            self.embedding,
            self.embedding_scale,
            self.layers,
            self.rotary.of_layer,
            self.norm,
            self.head,
            self.positions,
            self.inputs,
            memory,
        )

    def kept(self, cache: LayerCache) -> Sequence[Kept]:
        """Return each layer's part of the cache."""
        pages = iter(cache.layers)
        if reads := self.config.reads:
            own = {layer: next(pages) for layer in dict.fromkeys(reads)}
            return [own[layer] for layer in reads]
        if cache.states is None:
            return cache.layers
        if self.config.parallel is not None:
            return list(zip(cache.layers, cache.states.layers, strict=True))
        states = iter(cache.states.layers)
        return [next(states if recurrent else pages) for recurrent in self.config.recurrent]

    def _plan(self, batch: Batch, cache: LayerCache) -> DecodePlan | None:
        """The step as one operator, None where the layers have to be called."""
        if len(batch.ids_T) > MOST_ROWS or self.embedding_norm is not None or batch.pictures is not None:
            return None
        if batch.adapted is not None and batch.adapted.native is None:
            return None
        plan = plans.get(cache)
        memory = None if batch.memory is None else batch.memory.layers
        if plan is None or not plan.holds(self.embedding, self.layers, self.head, memory):
            parts = self.step_modules(memory)
            plans[cache] = plan = DecodePlan(parts, self.config, cache, self.kept(cache))
        return None if plan.unplanned or plan.watched else plan

    def _recorded(self, batch: Batch, cache: PagedCache) -> torch.Tensor | None:
        """Logits (T, V) of a step that was recorded, None where the layers have to be called."""
        if not recordable(batch):
            return None
        recorded = steps.get(cache)
        if recorded is None or not recorded.holds:
            recorded = RecordedSteps(self, self.config, lambda *of: self.logits(self(*of)))
            steps[cache] = recorded
        return recorded.logits(batch, cache)

    @property
    def _plain(self) -> bool:
        """Check whether the output layer's numbers are the logits."""
        return self.config.logit_scale == 1 and not self.config.logit_soft_cap
