"""One decoder layer: attention over the paged cache, a feed-forward block or a mixture of experts, and their norms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.hardware.kernels.gpu import operators as gpu
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.decoder.batch import Batch, WholePictures
from torchwright.models.decoder.cache import LayerPages
from torchwright.models.decoder.config import DecoderConfig, ExpertsConfig
from torchwright.models.decoder.functional import ops
from torchwright.models.decoder.latent import LatentAttention
from torchwright.models.decoder.low_rank import LayerAdapters, project
from torchwright.models.decoder.recurrent import mixer
from torchwright.models.decoder.rotary_cache import RotaryAngles
from torchwright.models.decoder.shared import route
from torchwright.models.decoder.states import LayerStates
from torchwright.models.decoder.weights import LayerParts


class PagedAttention(nn.Module):
    """Grouped-query attention; query, key and value projections are one linear layer."""

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    bias: torch.Tensor | None
    sinks: torch.Tensor | None
    value_norm: torch.Tensor | None

    def __init__(self, config: DecoderConfig, weights: LayerParts, layer: int) -> None:
        super().__init__()
        self.config, self.window, self.layer = config.at(layer), config.windows[layer], layer
        self.qkv, self.o = weights.linear(layer, "qkv"), weights.linear(layer, "o")
        self.register_buffer("q_norm", weights.norm(layer, "q_norm"))
        self.register_buffer("k_norm", weights.norm(layer, "k_norm"))
        self.register_buffer("bias", weights.attention_bias())
        self.register_buffer("sinks", weights.sinks(layer) if config.sinks else None)
        ones_D = torch.ones(self.config.head_dim) if config.value_norm and self.config.kv_heads else None
        self.register_buffer("value_norm", ones_D, persistent=False)

    @property
    def unplanned(self) -> str | None:
        """Why no plan takes it (`plan.py`), None where one does."""
        if self.config.qk_norm == "projection" or self.config.clip_qkv is not None:
            return "queries and keys that are normed or clipped all heads together"
        if self.sinks is not None:
            return "attention with sinks"
        if self.config.output_gate:
            return "attention with a gate of its output"
        return _not_packed(self.qkv, self.o)

    def forward(
        self, x_TE: torch.Tensor, batch: Batch, angles: RotaryAngles, pages: LayerPages
    ) -> torch.Tensor:
        config, (cos, sin, rows_T) = self.config, angles
        by_head = config.qk_norm == "head"
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
            self.q_norm if by_head else None,
            self.k_norm if by_head else None,
            config.eps,
        )
        out_THD = self._attend(q_THD, pages, batch, causal=config.causal)
        if batch.pictures is not None and (whole := batch.pictures.whole) is not None:
            seen_NHD = self._attend(q_THD[whole.rows_N], pages, whole, causal=False)
            out_THD = out_THD.index_copy(0, whole.rows_N, seen_NHD)
        out_TF = out_THD.flatten(1)
        return project(self.o, out_TF if gate is None else out_TF * gate.sigmoid(), "o", adapters)

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


class MemoryAttention(nn.Module):
    """Attention of each token to all of its sequence's memory, whose keys and values were written before."""

    def __init__(self, config: DecoderConfig, weights: LayerParts, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.q, self.o = weights.linear(layer, "memory_q"), weights.linear(layer, "memory_o")
        self.kv = weights.linear(layer, "memory_kv")

    @property
    def unplanned(self) -> str | None:
        """Why no plan takes it (`plan.py`), None where one does."""
        return _not_packed(self.q, self.o)

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


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)), gate and up as one linear layer."""

    def __init__(self, activation: str, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.activation, self.gate_up, self.down = activation, gate_up, down

    @property
    def unplanned(self) -> str | None:
        """Why no plan takes it (`plan.py`), None where one does."""
        return _not_packed(self.gate_up, self.down)

    def forward(self, x_TE: torch.Tensor, adapters: LayerAdapters | None = None) -> torch.Tensor:
        wide_TF = ops.gated(project(self.gate_up, x_TE, "gate_up", adapters), self.activation)
        return project(self.down, wide_TF, "down", adapters)


class PlainFeedForward(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, activation: str, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.activation, self.up, self.down = activation, up, down

    @property
    def unplanned(self) -> str | None:
        """Why no plan takes it (`plan.py`), None where one does."""
        return _not_packed(self.up, self.down)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self.down(ops.activate(self.up(x_TE), self.activation))


class RoutedExperts(nn.Module):
    """Each token's chosen experts, weighted by the router's softmax; an expert sees all of its tokens in one call."""

    router: torch.Tensor
    packed_router: torch.Tensor | None
    bias: torch.Tensor | None
    router_bias: torch.Tensor | None
    scale: torch.Tensor | None
    unplanned = "a mixture of experts, whose rows go different ways"

    def __init__(
        self, config: DecoderConfig, experts: ExpertsConfig, weights: LayerParts, layer: int
    ) -> None:
        super().__init__()
        self.config, self.count = experts, experts.count
        router = weights.router(layer)
        self.register_buffer("router", router)
        # PyTorch's product depends on the batch size, and a token near a tie would choose by its neighbours.
        takes = router.dtype == torch.bfloat16 and ops.on(weights.device, router.dtype) is not None
        layout = ops.layout(for_gpu=gpu.takes(weights.device))
        packed = layout.pack_bf16(router) if takes else None
        self.register_buffer("packed_router", packed, persistent=False)
        self.register_buffer("bias", weights.expert_bias(layer))
        self.register_buffer("router_bias", weights.router_bias(layer) if experts.router_bias else None)
        self.register_buffer("scale", weights.vector(layer, "expert_scale") if experts.expert_scale else None)
        self.experts = nn.ModuleList(
            GatedFeedForward(config.activation, *weights.expert(layer, expert))
            for expert in range(experts.count)
        )
        self.shared = GatedFeedForward(config.activation, *weights.shared(layer)) if experts.shared else None
        self.shared_gate = weights.shared_gate(layer) if experts.shared_gate else None

    def forward(self, x_TE: torch.Tensor, routed_TE: torch.Tensor | None = None) -> torch.Tensor:
        """The router reads `routed_TE`, or `x_TE` if that is not given."""
        routed_TE = x_TE if routed_TE is None else routed_TE
        if self.packed_router is None:
            score_TX = F.linear(routed_TE, self.router)
        else:
            kernels = ops.on(x_TE.device, x_TE.dtype)
            score_TX = kernels.linear_bf16(routed_TE, self.packed_router, None, self.count)
        if self.router_bias is not None:
            score_TX = score_TX + self.router_bias
        _, expert_TC, share_TC = route(score_TX, self.bias, self.config)
        if self.config.normalize:
            share_TC = share_TC / share_TC.sum(-1, keepdim=True)
        if self.config.scale != 1:
            share_TC = share_TC * self.config.scale
        if self.scale is not None:
            share_TC = share_TC * self.scale[expert_TC]
        out_TE = torch.zeros_like(x_TE)
        # In the order of the experts' numbers, so that a token's sum does not depend on the others.
        for expert in expert_TC.unique().tolist():
            row, place = (expert_TC == expert).nonzero(as_tuple=True)
            part = self.experts[expert](x_TE[row]) * share_TC[row, place, None].to(x_TE.dtype)
            out_TE.index_add_(0, row, part)
        return out_TE if self.shared is None else out_TE + self._shared(self.shared, x_TE)

    def _shared(self, block: GatedFeedForward, x_TE: torch.Tensor) -> torch.Tensor:
        return block(x_TE) if self.shared_gate is None else block(x_TE) * self.shared_gate(x_TE).sigmoid()


def feed_forward(
    config: DecoderConfig, weights: LayerParts, layer: int
) -> GatedFeedForward | PlainFeedForward | RoutedExperts:
    """The block of a layer that its configuration describes."""
    if config.sparse[layer]:
        assert config.experts
        return RoutedExperts(config, config.experts, weights, layer)
    if not config.gated:
        return PlainFeedForward(config.activation, weights.linear(layer, "up"), weights.linear(layer, "down"))
    return GatedFeedForward(
        config.activation, weights.linear(layer, "gate_up"), weights.linear(layer, "down")
    )


def token_mixer(config: DecoderConfig, weights: LayerParts, layer: int) -> nn.Module:
    """The recurrent part or the attention of a layer."""
    if config.recurrent and config.recurrent[layer]:
        return mixer(config, weights, layer)
    attention = PagedAttention if config.latent is None else LatentAttention
    return attention(config, weights, layer)


class Layer(nn.Module):
    """Attention, perhaps attention to a memory, and feed-forward block, each with a norm before it, after it, or both.

    The output of the last block travels next to the residual stream until the next norm adds it, because one kernel
    adds and normalizes.
    """

    memory: MemoryAttention | None
    pre_attention: torch.Tensor | None
    pre_memory: torch.Tensor | None
    post_attention: torch.Tensor | None
    pre_mlp: torch.Tensor | None
    post_mlp: torch.Tensor | None

    def __init__(self, config: DecoderConfig, weights: LayerParts, layer: int) -> None:
        super().__init__()
        self.eps, self.residual_scale, self.layer = config.eps, config.residual_scale, layer
        self.attention = token_mixer(config, weights, layer)
        self.mlp = feed_forward(config, weights, layer)
        self.memory = MemoryAttention(config, weights, layer) if config.remembers else None
        self.register_buffer("pre_memory", weights.norm(layer, "pre_memory") if self.memory else None)
        for part in ("pre_attention", "post_attention", "pre_mlp", "post_mlp"):
            self.register_buffer(part, weights.norm(layer, part))

    def forward(
        self,
        delta_TE: torch.Tensor | None,
        stream_TE: torch.Tensor,
        batch: Batch,
        angles: RotaryAngles,
        kept: LayerPages | LayerStates,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(delta, stream) in, (delta, stream) out; their sum is the layer's input and output."""
        x_TE, stream_TE = join(delta_TE, stream_TE, self.pre_attention, self.eps)
        at = (batch, kept) if isinstance(kept, LayerStates) else (batch, angles, kept)
        delta_TE = self._leave(self.attention(x_TE, *at), self.post_attention)
        if self.memory is not None:
            x_TE, stream_TE = join(delta_TE, stream_TE, self.pre_memory, self.eps)
            delta_TE = self.memory(x_TE, batch)
        x_TE, stream_TE = join(delta_TE, stream_TE, self.pre_mlp, self.eps)
        if batch.adapted is not None and isinstance(self.mlp, GatedFeedForward):
            out_TE = self.mlp(x_TE, LayerAdapters(batch.adapted, self.layer))
        else:
            out_TE = self.mlp(x_TE)
        return self._leave(out_TE, self.post_mlp), stream_TE

    @property
    def unplanned(self) -> str | None:
        """Why no plan takes it (`plan.py`), None where one does."""
        if self.pre_attention is None or self.pre_mlp is None:
            return "blocks without a norm before them"
        if self.residual_scale != 1:
            return "blocks that are scaled before they join the residual stream"
        blocks = [self.attention, self.mlp, *([] if self.memory is None else [self.memory])]
        return next((block.unplanned for block in blocks if block.unplanned), None)

    def linears(self) -> Iterator[tuple[dict[str, nn.Module | None], str, nn.Module]]:
        """Its linear layers, but for experts': where each hangs, its name there, and itself; in the order of a plan."""
        yield from _linears(self.attention, "qkv", "o")
        yield from _linears(self.mlp, "gate_up", "up", "down")
        if self.memory is not None:
            yield from _linears(self.memory, "q", "o")

    def plan(self, native: Any, rotary: int, pages: LayerPages, memory: LayerPages | None) -> None:
        """Tell the kernels' plan what the layer is; `rotary` is the index of its rotary embedding."""
        attention = self.attention
        assert isinstance(attention, PagedAttention), "a recurrent layer has no plan"
        packed = [linear.planned() for *_, linear in self.linears() if isinstance(linear, PackedLinear)]
        for linear in packed[:4]:
            native.add_linear(*linear)
        native.add_layer(
            self.pre_attention,
            self.post_attention,
            self.pre_mlp,
            self.post_mlp,
            attention.q_norm,
            attention.k_norm,
            *pages.tensors,
            rotary,
            attention.window,
            attention.bias,
        )
        if memory is not None:
            for linear in packed[4:]:
                native.add_linear(*linear)
            native.add_memory(self.pre_memory, *memory.tensors)

    def _leave(self, x_TE: torch.Tensor, norm_E: torch.Tensor | None) -> torch.Tensor:
        if norm_E is not None:
            x_TE = ops.rms_norm(x_TE, norm_E, self.eps)
        return x_TE if self.residual_scale == 1 else x_TE * self.residual_scale


def _linears(block: nn.Module, *names: str) -> Iterator[tuple[dict[str, nn.Module | None], str, nn.Module]]:
    """Those of these names that a block has."""
    for name in names:
        if name in block._modules:
            yield block._modules, name, block.get_submodule(name)


def _not_packed(*linears: nn.Module) -> str | None:
    packed = all(isinstance(linear, PackedLinear) for linear in linears)
    return None if packed else "linear layers of PyTorch"


def join(
    delta_TE: torch.Tensor | None, stream_TE: torch.Tensor, norm_E: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's input and the residual stream, once `delta_TE` (None before the first layer) is added to it."""
    if norm_E is not None and delta_TE is not None:
        return ops.add_rms_norm(delta_TE, stream_TE, norm_E, eps)
    if delta_TE is not None:
        stream_TE = stream_TE + delta_TE
    return (stream_TE if norm_E is None else ops.rms_norm(stream_TE, norm_E, eps)), stream_TE
