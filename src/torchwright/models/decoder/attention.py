"""Attention over the paged cache: of a decoder's tokens to each other, and to a memory."""

from __future__ import annotations

import torch
from torch import nn

from torchwright.hardware.kernels.limits import LANES, LARGEST_HEAD
from torchwright.models.decoder.batch import Batch, WholePictures
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.functional import ops
from torchwright.models.decoder.low_rank import LayerAdapters, place_of, project
from torchwright.models.decoder.pages import LayerPages
from torchwright.models.decoder.program import Cells, Program, not_packed
from torchwright.models.decoder.rotary_cache import RotaryAngles
from torchwright.models.decoder.weights import LayerParts


class PagedAttention(nn.Module):
    """Grouped-query attention; query, key and value projections are one linear layer."""

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    plain_norm: torch.Tensor | None
    q_scale: torch.Tensor | None
    bias: torch.Tensor | None
    sinks: torch.Tensor | None
    value_norm: torch.Tensor | None

    def __init__(self, config: DecoderConfig, weights: LayerParts, layer: int) -> None:
        super().__init__()
        self.config, self.window, self.layer = config.at(layer), config.windows[layer], layer
        self.qkv, self.o = weights.linear(layer, "qkv"), weights.linear(layer, "o")
        q_norm, k_norm = weights.norm(layer, "q_norm"), weights.norm(layer, "k_norm")
        self.register_buffer("q_norm", q_norm)
        self.register_buffer("k_norm", k_norm)
        plain_D, scale_D = None, None
        if config.qk_norm == "rotated":
            # A rotation keeps the length of a head, and scores are sums of products of a query's and a key's numbers:
            # norms without weights may come before it, and queries take both weights behind it.
            assert q_norm is not None
            assert k_norm is not None
            plain_D, scale_D = torch.ones_like(q_norm), q_norm * k_norm
        self.register_buffer("plain_norm", plain_D, persistent=False)
        self.register_buffer("q_scale", scale_D, persistent=False)
        self.register_buffer("bias", weights.attention_bias())
        self.register_buffer("sinks", weights.sinks(layer) if config.sinks else None)
        ones_D = torch.ones(self.config.head_dim) if config.value_norm and self.config.kv_heads else None
        self.register_buffer("value_norm", ones_D, persistent=False)

    @property
    def unplanned(self) -> str | None:
        """The reason for which no plan takes it (`plan.py`), or None."""
        if self.config.head_dim % LANES or self.config.head_dim > LARGEST_HEAD:
            return f"heads of {self.config.head_dim} dimensions, which the compiled attention does not take"
        return not_packed(self.qkv, self.o)

    def forward(
        self, x_TE: torch.Tensor, batch: Batch, angles: RotaryAngles, pages: LayerPages
    ) -> torch.Tensor:
        config, (cos, sin, rows_T) = self.config, angles
        adapters = None if batch.adapted is None else LayerAdapters(batch.adapted, self.layer)
        qkv, gate = self._project(x_TE, adapters)
        q_THD = ops.rope_store(
            qkv,
            cos,
            sin,
            rows_T,
            batch.slots_T,
            *pages.tensors,
            config.heads,
            config.kv_heads,
            *self._head_norms,
            config.eps,
        )
        if self.q_scale is not None:
            q_THD = q_THD * self.q_scale.to(q_THD.dtype)
        out_THD = self._attend(q_THD, pages, batch, causal=config.causal)
        if batch.pictures is not None and (whole := batch.pictures.whole) is not None:
            seen_NHD = self._attend(q_THD[whole.rows_N], pages, whole, causal=False)
            out_THD = out_THD.index_copy(0, whole.rows_N, seen_NHD)
        out_TF = out_THD.flatten(1)
        if gate is not None:
            out_TF = out_TF * ops.activate(gate, "sigmoid")
        return project(self.o, out_TF, "o", adapters)

    def plan(self, program: Program, x: Cells, to: Cells, rotary: int, pages: LayerPages) -> None:
        """Add to a program what `forward` does; `rotary` is the index of the rotary embedding."""
        config, D = self.config, self.config.head_dim
        q = config.heads * D
        with program.scope():
            qkv, gate = self._plan_projection(program, x)
            turned, mixed = program.rows(q), program.rows(q)
            program.store(qkv, turned, pages, rotary, keeps=config.kv_heads > 0, norms=self._head_norms)
            if self.q_scale is not None:
                program.scale_columns(self.q_scale.repeat(config.heads), turned)
            program.attend(
                turned,
                mixed,
                pages,
                config.scale,
                window=self.window,
                soft_cap=config.attention_soft_cap,
                bias=self.bias,
                sinks=self.sinks,
            )
            if gate is not None:
                program.activate("sigmoid", gate, turned)
                program.multiply(mixed, turned, mixed)
            program.linear(self.o, mixed, to, place_of(self.layer, "o"))

    @property
    def _head_norms(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The weights of the norms of each head's query and key before they turn."""
        if self.config.qk_norm == "rotated":
            return self.plain_norm, self.plain_norm
        return (self.q_norm, self.k_norm) if self.config.qk_norm == "head" else (None, None)

    def _attend(
        self, q_THD: torch.Tensor, pages: LayerPages, over: Batch | WholePictures, *, causal: bool
    ) -> torch.Tensor:
        return ops.paged_attention(
            q_THD,
            *pages.tensors,
            over.block_tables_BP,
            over.query_starts,
            over.context_lens_B,
            self.config.scale,
            self.window,
            self.config.attention_soft_cap,
            causal=causal,
            bias=self.bias,
            sinks=self.sinks,
        )

    def _project(
        self, x_TE: torch.Tensor, adapters: LayerAdapters | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries, keys and values, and the gate of the output."""
        config, qkv, gate = self.config, project(self.qkv, x_TE, "qkv", adapters), None
        D = config.head_dim
        if config.output_gate:
            qkv, gate = qkv.split([(config.heads + 2 * config.kv_heads) * D, config.heads * D], dim=-1)
            qkv = qkv.contiguous()
        if self.value_norm is not None:
            qkv = self._norm_values(qkv, self.value_norm)
        if config.qk_norm == "projection":
            assert self.q_norm is not None
            assert self.k_norm is not None
            q, k, v = qkv.split([config.heads * D, config.kv_heads * D, config.kv_heads * D], dim=-1)
            q = ops.rms_norm(q.contiguous(), self.q_norm, config.eps)
            k = ops.rms_norm(k.contiguous(), self.k_norm, config.eps)
            qkv = torch.cat([q, k, v], dim=-1)
        return qkv if config.clip_qkv is None else qkv.clamp(-config.clip_qkv, config.clip_qkv), gate

    def _norm_values(self, qkv: torch.Tensor, ones_D: torch.Tensor) -> torch.Tensor:
        """Queries and keys as they are, and normed values, which may be keys."""
        config, D = self.config, self.config.head_dim
        q, k, *values = qkv.split(
            [config.heads * D, *[config.kv_heads * D] * (2 - config.keys_as_values)], -1
        )
        v_TKD = (values[0] if values else k).unflatten(1, (-1, D)).contiguous()
        return torch.cat([q, k, ops.rms_norm(v_TKD, ones_D, config.eps).flatten(1)], dim=-1)

    def _plan_projection(self, program: Program, x: Cells) -> tuple[Cells, Cells | None]:
        """Add what `_project` does."""
        config, D = self.config, self.config.head_dim
        q, kv = config.heads * D, config.kv_heads * D
        qkv, gate = program.linear(self.qkv, x, place=place_of(self.layer, "qkv")), None
        if config.output_gate:
            whole, qkv = qkv, program.rows(q + 2 * kv)
            program.copy(whole.part(0, q + 2 * kv), qkv)
            gate = whole.part(q + 2 * kv, q)
        if self.value_norm is not None:
            if config.keys_as_values:
                whole, qkv = qkv, program.rows(q + 2 * kv)
                program.copy(whole, qkv.part(0, q + kv))
                program.copy(whole.part(q, kv), qkv.part(q + kv, kv))
            program.norm(self.value_norm, values := qkv.part(q + kv, kv), values)
        if config.qk_norm == "projection":
            for norm_D, cells in ((self.q_norm, qkv.part(0, q)), (self.k_norm, qkv.part(q, kv))):
                assert norm_D is not None
                program.norm(norm_D, cells, cells)
        if config.clip_qkv is not None:
            program.clamp(config.clip_qkv, qkv)
        return qkv, gate


class MemoryAttention(nn.Module):
    """Attention of each token to all of its sequence's memory, whose keys and values were written before."""

    def __init__(self, config: DecoderConfig, weights: LayerParts, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.q, self.o = weights.linear(layer, "memory_q"), weights.linear(layer, "memory_o")
        self.kv = weights.linear(layer, "memory_kv")

    @property
    def unplanned(self) -> str | None:
        """The reason for which no plan takes it (`plan.py`), or None."""
        return not_packed(self.q, self.o)

    def write(self, states_SE: torch.Tensor, batch: Batch, angles: RotaryAngles, pages: LayerPages) -> None:
        """Keep the keys and values of states in the slots of a batch."""
        cos, sin, rows_S = angles
        heads = (0, self.config.kv_heads, None, None, self.config.eps)
        ops.rope_store(self.kv(states_SE), cos, sin, rows_S, batch.slots_T, *pages.tensors, *heads)

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        config, memory = self.config, batch.memory
        assert memory is not None, "a decoder with a memory is called without one"
        pages = memory.layers[self.layer]
        out_THD = ops.paged_attention(
            self.q(x_TE).unflatten(1, (config.heads, config.head_dim)),
            *pages.tensors,
            memory.block_tables_BP,
            batch.query_starts,
            memory.lengths_B,
            config.scale,
            0,
            config.attention_soft_cap,
            causal=False,
        )
        return self.o(out_THD.flatten(1))

    def plan(self, program: Program, x: Cells, to: Cells, pages: LayerPages) -> None:
        """Add to a program what `forward` does."""
        config, width = self.config, self.config.heads * self.config.head_dim
        with program.scope():
            q, mixed = program.linear(self.q, x), program.rows(width)
            program.attend(q, mixed, pages, config.scale, soft_cap=config.attention_soft_cap, remembers=True)
            program.linear(self.o, mixed, to)
