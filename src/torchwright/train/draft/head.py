"""An EAGLE-3 head (Li et al., 2025) as a module that is trained, its steps unrolled as it is served."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.hardware.kernels.reference import ACTIVATIONS
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.draft.eagle_config import EagleConfig
from torchwright.train.draft.chain import Chain, following, step_angles
from torchwright.train.model.blocks import RMSNorm, rotate


class SelfAttention(nn.Module):
    """The attention of a head's layer, by `Chain`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        E, D = config.model, config.head_dim
        self.head_dim, self.scale = D, config.scale
        self.q_proj = nn.Linear(2 * E, config.heads * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(2 * E, config.kv_heads * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(2 * E, config.kv_heads * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * D, E, bias=config.o_bias)

    def forward(
        self, x_BTX: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, chain: Chain
    ) -> torch.Tensor:
        q, k, v = (
            linear(x_BTX).unflatten(-1, (-1, self.head_dim))
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed_BHTD = chain.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.scale)
        return self.o_proj(mixed_BHTD.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """down(activation(gate(x)) · up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        E, hidden = config.model, config.feed_forward
        self.activation = config.activation
        self.gate_proj = nn.Linear(E, hidden, bias=config.mlp_bias)
        self.up_proj = nn.Linear(E, hidden, bias=config.mlp_bias)
        self.down_proj = nn.Linear(hidden, E, bias=config.mlp_bias)

    def forward(self, x_BTE: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x_BTE)) * self.up_proj(x_BTE))


class Midlayer(nn.Module):
    """The head's one layer, over a token's embedding and the state before it."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        layer = config.layer
        self.norm_before_residual = config.norm_before_residual
        self.self_attn, self.mlp = SelfAttention(layer), FeedForward(layer)
        self.hidden_norm = RMSNorm(layer.model, layer.eps, 0.0)
        self.input_layernorm = RMSNorm(layer.model, layer.eps, 0.0)
        self.post_attention_layernorm = RMSNorm(layer.model, layer.eps, 0.0)

    def forward(
        self,
        embedded_BTE: torch.Tensor,
        state_BTE: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        chain: Chain,
    ) -> torch.Tensor:
        hidden_BTE = self.hidden_norm(state_BTE)
        x = torch.cat([self.input_layernorm(embedded_BTE), hidden_BTE], -1)
        stream_BTE = hidden_BTE if self.norm_before_residual else state_BTE
        stream_BTE = stream_BTE + self.self_attn(x, cos, sin, chain)
        return stream_BTE + self.mlp(self.post_attention_layernorm(stream_BTE))


class EagleHead(nn.Module):
    """The head; its parameters are named as SpecForge names the tensors of a head's file."""

    embedding: torch.Tensor
    ids: torch.Tensor

    def __init__(self, config: EagleConfig, embedding_VE: torch.Tensor, ids_D: torch.Tensor) -> None:
        """`embedding_VE` is frozen; `ids_D` are the tokens that the head can propose, rising, int64."""
        super().__init__()
        self.config, layer = config, config.layer
        wide = len(config.observed) * config.target_model
        self.fc = nn.Linear(wide, layer.model, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(layer.model, layer.eps, 0.0)
        self.lm_head = nn.Linear(layer.model, config.draft_vocabulary, bias=False)
        self.input_norm = RMSNorm(wide, layer.eps, 0.0) if config.norm_before_fuse else None
        self.register_buffer("embedding", embedding_VE, persistent=False)
        self.register_buffer("ids", ids_D, persistent=False)
        self.observed = config.observed

    def chains(
        self,
        ids_BT: torch.Tensor,
        observed_BTF: torch.Tensor,
        positions_BT: torch.Tensor,
        documents_BT: torch.Tensor | None,
        steps: int,
    ) -> Iterator[torch.Tensor]:
        """Hidden states (B, T, E) of each step: at step k slot j has read the text's tokens up to j + 1 + k.

        `observed_BTF` are the target's features. Slots whose tokens lie behind the row's or the document's end read
        something else, and nothing that counts reads them.
        """
        rope, chain = self.config.layer.ropes[0], Chain.over(ids_BT, documents_BT)
        features_BTF = observed_BTF.to(self.fc.weight.dtype)
        state_BTE = self.fc(features_BTF if self.input_norm is None else self.input_norm(features_BTF))
        for step in range(steps):
            embedded_BTE = F.embedding(following(ids_BT, step), self.embedding).to(state_BTE.dtype)
            cos, sin = step_angles(rope, positions_BT, step, steps)
            state_BTE = self.midlayer(embedded_BTE, state_BTE, cos, sin, chain)
            yield state_BTE

    def answer(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Logits (N, D) of the tokens that the head can propose."""
        return self.lm_head(self.norm(hidden_NE))
