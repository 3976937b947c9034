"""Multi-head latent attention (DeepSeek-AI, 2024) over a cache that holds one vector for all heads of a token.

A head's keys and values are products of that vector: score = q · (K c) = (Kᵀ q) · c, and Σ w (V c) = V (Σ w c). So
queries are multiplied by Kᵀ, attention has one key-value head, and its output is multiplied by V.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from torchwright.hardware.kernels.head_linears import HeadLinears
from torchwright.hardware.kernels.limits import LANES, LARGEST_HEAD
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.functional import ops
from torchwright.models.decoder.pages import LayerPages
from torchwright.models.decoder.program import NOT_PACKED, Cells, Program, not_packed
from torchwright.models.decoder.rotary_cache import RotaryAngles
from torchwright.models.decoder.shared import halves

EPS = 1e-6
"""Added under the root in norms of latent vectors; transformers does not read it from config.json."""


class LatentParts(Protocol):
    """The parts of latent attention; `weights.LayerParts` says what they are."""

    def norm(self, layer: int, part: str) -> torch.Tensor | None: ...
    def linear(self, layer: int, part: str) -> nn.Module: ...
    def from_latent(self, layer: int, part: str) -> HeadLinears: ...


class LatentAttention(nn.Module):
    """Called like `PagedAttention`. The vector that pages keep has the turned dimensions first, then the latent ones;
    pages of values hold it a second time, because kernels read keys and values in different orders.
    """

    query_norm: torch.Tensor | None
    latent_norm: torch.Tensor

    def __init__(self, config: DecoderConfig, weights: LatentParts, layer: int) -> None:
        super().__init__()
        assert config.latent
        self.config, self.sizes, self.window = config, config.latent, config.windows[layer]
        ranked = config.latent.query_rank is not None
        self.query_in = weights.linear(layer, "query_in") if ranked else None
        self.register_buffer("query_norm", weights.norm(layer, "query_norm") if ranked else None)
        self.query, self.latent = weights.linear(layer, "query"), weights.linear(layer, "latent")
        self.register_buffer("latent_norm", weights.norm(layer, "latent_norm"))
        self.keys, self.values = weights.from_latent(layer, "keys"), weights.from_latent(layer, "values")
        self.o = weights.linear(layer, "o")

    def forward(
        self, x_TE: torch.Tensor, batch: Batch, angles: RotaryAngles, pages: LayerPages
    ) -> torch.Tensor:
        config, sizes, (cos, sin, rows_T) = self.config, self.sizes, angles
        q_THD = self._queries(x_TE).unflatten(1, (config.heads, -1))
        plain_THD, turned_THD = q_THD.split([sizes.plain, sizes.turned], dim=-1)
        latent_TR, key_TD = self.latent(x_TE).split([sizes.rank, sizes.turned], dim=-1)
        latent_TR = ops.rms_norm(latent_TR.contiguous(), self.latent_norm, EPS)
        q_THD = torch.cat([self._halves(turned_THD), self.keys(plain_THD)], dim=-1)
        kept_TD = torch.cat([self._halves(key_TD), latent_TR], dim=-1)
        q_THD = ops.rope_store(
            torch.cat([q_THD.flatten(1), kept_TD, kept_TD], dim=-1),
            cos,
            sin,
            rows_T,
            batch.slots_T,
            *pages.tensors,
            config.heads,
            1,
            None,
            None,
            config.eps,
        )
        out_THD = ops.paged_attention(
            q_THD,
            *pages.tensors,
            batch.block_tables_BP,
            batch.query_starts,
            batch.context_lens_B,
            config.scale,
            self.window,
            config.attention_soft_cap,
        )
        return self.o(self.values(out_THD[..., sizes.turned :]).flatten(1))

    @property
    def unplanned(self) -> str | None:
        """The reason for which no plan takes it (`plan.py`), or None."""
        if self.config.head_dim % LANES or self.config.head_dim > LARGEST_HEAD:
            return f"latent vectors of {self.config.head_dim} numbers, which the compiled attention does not take"
        if self.keys.packed is None or self.values.packed is None:
            return NOT_PACKED
        return not_packed(self.query_in, self.query, self.latent, self.o)

    def plan(self, program: Program, x: Cells, to: Cells, rotary: int, pages: LayerPages) -> None:
        """Add to a program what `forward` does; `rotary` is the index of the rotary embedding."""
        config, sizes, heads = self.config, self.sizes, self.config.heads
        turned, D, own = sizes.turned, self.config.head_dim, sizes.plain + sizes.turned
        with program.scope():
            q, latent = self._plan_queries(program, x), program.linear(self.latent, x)
            qkv = program.rows((heads + 2) * D)
            queries, kept, again = qkv.split(heads * D, D, D)
            program.heads(
                *(self.keys, q.part(0, (heads - 1) * own + sizes.plain), own),
                *(queries.part(turned, (heads - 1) * D + sizes.rank), D),
            )
            program.copy(
                q.part(sizes.plain, (heads - 1) * own + turned),
                queries,
                parts=heads,
                steps=(own, D),
                halves=sizes.interleaved,
            )
            vector, key = latent.split(sizes.rank, turned)
            program.copy(key, kept.part(0, turned), halves=sizes.interleaved)
            program.norm(self.latent_norm, vector, kept.part(turned, sizes.rank), EPS)
            program.copy(kept, again)
            stored, mixed = program.rows(heads * D), program.rows(heads * D)
            program.store(qkv, stored, pages, rotary)
            scale, soft_cap = config.scale, config.attention_soft_cap
            program.attend(stored, mixed, pages, scale, window=self.window, soft_cap=soft_cap)
            values = program.rows(heads * sizes.value)
            program.heads(
                self.values, mixed.part(turned, (heads - 1) * D + sizes.rank), D, values, sizes.value
            )
            program.linear(self.o, values, to)

    def _plan_queries(self, program: Program, x: Cells) -> Cells:
        """Add what `_queries` does."""
        if self.query_in is None or self.query_norm is None:
            return program.linear(self.query, x)
        low = program.linear(self.query_in, x)
        program.norm(self.query_norm, low, low, EPS)
        return program.linear(self.query, low)

    def _queries(self, x_TE: torch.Tensor) -> torch.Tensor:
        if self.query_in is None or self.query_norm is None:
            return self.query(x_TE)
        return self.query(ops.rms_norm(self.query_in(x_TE), self.query_norm, EPS))

    def _halves(self, x: torch.Tensor) -> torch.Tensor:
        """Return the dimensions that turn as kernels take them."""
        return halves(x) if self.sizes.interleaved else x
