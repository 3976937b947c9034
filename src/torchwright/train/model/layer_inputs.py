"""Gemma 4's layers over whole sequences: they read inputs of their own, and some read keys of earlier layers.

`models/decoder/layer_inputs.py` serves them.
"""

from __future__ import annotations

import torch
from torch import nn

from torchwright.hardware.kernels import norm
from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.model.attention import Attend, Scores, fused_attention
from torchwright.train.model.blocks import (
    FeedForward,
    MixtureOfExperts,
    RMSNorm,
    RotaryAngles,
    gated,
    rotate,
)

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of all tokens, (B, K, T, D) each."""


class TokenInputs(nn.Module):
    """The inputs (B, T, L, I) of all layers: a table's row of the token, and a product of its embedding."""

    def __init__(self, config: DecoderConfig, width: int, vocabulary: int) -> None:
        super().__init__()
        self.layers, self.scale, self.shrink = config.layers, width**0.5, config.model**-0.5
        self.table = nn.Embedding(vocabulary, config.layers * width)
        self.project = nn.Linear(config.model, config.layers * width, bias=False)
        self.norm = RMSNorm(width, config.eps, 0.0)

    def forward(self, ids_BT: torch.Tensor, embedded_BTE: torch.Tensor) -> torch.Tensor:
        own = self.table(ids_BT)
        # As the model's dtype rounds it, like the factor of the embedding.
        own = own * torch.full((), self.scale, dtype=own.dtype, device=own.device)
        own_BTLI, mixed_BTLI = (
            part.unflatten(-1, (self.layers, -1)) for part in (own, self.project(embedded_BTE) * self.shrink)
        )
        return (self.norm(mixed_BTLI) + own_BTLI) * 2**-0.5


class KeysValues(nn.Module):
    """A layer's keys and values, which layers behind it may read as well; values may be keys before their norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        E, D, kv_heads = config.model, config.head_dim, config.kv_heads
        self.head_dim, self.eps = D, config.eps
        self.k = nn.Linear(E, kv_heads * D, bias=config.qkv_bias)
        self.v = None if config.keys_as_values else nn.Linear(E, kv_heads * D, bias=config.qkv_bias)
        self.k_norm = RMSNorm(D, config.eps, config.norm_offset)

    def forward(self, x_BTE: torch.Tensor, rotary_angles: RotaryAngles) -> KeysAndValues:
        assert rotary_angles is not None
        k = self.k(x_BTE).unflatten(-1, (-1, self.head_dim))
        v = k if self.v is None else self.v(x_BTE).unflatten(-1, (-1, self.head_dim))
        v = norm.rms_norm(v, None, self.eps)
        return rotate(self.k_norm(k), *rotary_angles).transpose(1, 2), v.transpose(1, 2)


class QueryAttention(nn.Module):
    """Attention of a layer's queries to keys and values that are given."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        E, width = config.model, config.heads * config.head_dim
        self.head_dim = config.head_dim
        self.scores = Scores(
            scale=config.scale, window=config.windows[layer], soft_cap=config.attention_soft_cap
        )
        self.q = nn.Linear(E, width, bias=config.qkv_bias)
        self.o = nn.Linear(width, E, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.eps, config.norm_offset)
        self.attend: Attend = fused_attention

    def forward(
        self,
        x_BTE: torch.Tensor,
        rotary_angles: RotaryAngles,
        k_BKTD: torch.Tensor,
        v_BKTD: torch.Tensor,
        documents_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert rotary_angles is not None
        q = self.q_norm(self.q(x_BTE).unflatten(-1, (-1, self.head_dim)))
        q_BHTD = rotate(q, *rotary_angles).transpose(1, 2)
        out_BHTD = self.attend(q_BHTD, k_BKTD, v_BKTD, self.scores, documents_BS)
        return self.o(out_BHTD.transpose(1, 2).flatten(2))


class OwnInput(nn.Module):
    """down(activation(gate(x)) · input): what a layer makes of its own input of each token."""

    def __init__(self, config: DecoderConfig, width: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = nn.Linear(config.model, width, bias=False)
        self.down = nn.Linear(width, config.model, bias=False)

    def forward(self, x_BTE: torch.Tensor, input_BTI: torch.Tensor) -> torch.Tensor:
        return self.down(gated(self.gate(x_BTE), input_BTI, self.activation))


class InputLayer(nn.Module):
    """Attention, a feed-forward block, perhaps experts next to it, and the layer's own input of each token if any.

    Each part has a norm before it and behind it.
    """

    layer_scale: torch.Tensor
    """(1,), by which the layer's output is multiplied; it does not learn."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        inputs, reads = config.layer_inputs, config.reads
        assert inputs
        self.keeps = layer in reads[layer + 1 :]
        """True if layers behind this one read its keys and values."""
        config = config.at(layer)

        def norm() -> RMSNorm:
            return RMSNorm(config.model, config.eps, config.norm_offset)

        self.pre_attention, self.post_attention = norm(), norm()
        self.keys_values = KeysValues(config) if config.kv_heads else None
        self.attention = QueryAttention(config, layer)
        self.pre_mlp, self.post_mlp = norm(), norm()
        self.mlp = FeedForward(config, config.feed_forward)
        self.mixture: MixtureOfExperts | None = None
        if config.experts is not None:
            self.post_dense, self.pre_experts, self.post_experts = norm(), norm(), norm()
            self.router_norm, self.shrink = norm(), config.model**-0.5
            self.mixture = MixtureOfExperts(config, config.experts)
        self.own_input: OwnInput | None = None
        if inputs.width:
            self.own_input, self.post_input = OwnInput(config, inputs.width), norm()
        self.register_buffer("layer_scale", torch.ones(1))

    def forward(
        self,
        x_BTE: torch.Tensor,
        rotary_angles: RotaryAngles,
        documents_BS: torch.Tensor | None,
        input_BTI: torch.Tensor | None,
        read: KeysAndValues | None,
    ) -> tuple[torch.Tensor, KeysAndValues | None]:
        """Return the layer's output, and its keys and values if others read them; `read` are those of another."""
        normed_BTE = self.pre_attention(x_BTE)
        if self.keys_values is not None:
            read = self.keys_values(normed_BTE, rotary_angles)
        assert read is not None
        delta_BTE = self.attention(normed_BTE, rotary_angles, *read, documents_BS)
        x_BTE = x_BTE + self.post_attention(delta_BTE)
        x_BTE = x_BTE + self.post_mlp(self._feed_forward(x_BTE))
        if self.own_input is not None:
            assert input_BTI is not None
            x_BTE = x_BTE + self.post_input(self.own_input(x_BTE, input_BTI))
        return x_BTE * self.layer_scale.to(x_BTE.dtype), read if self.keeps else None

    def _feed_forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        out_BTE = self.mlp(self.pre_mlp(x_BTE))
        if self.mixture is None:
            return out_BTE
        found_BTE = self.mixture(self.pre_experts(x_BTE), self.router_norm(x_BTE) * self.shrink)
        return self.post_dense(out_BTE) + self.post_experts(found_BTE)
