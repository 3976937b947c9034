"""Layers as the first Transformer had them: a LayerNorm after each block's sum with the stream, none before a block."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.models.decoder.attention import MemoryAttention, PagedAttention
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.feed_forward import feed_forward
from torchwright.models.decoder.layer_inputs import InputLayer
from torchwright.models.decoder.layers import Layer
from torchwright.models.decoder.pages import LayerPages
from torchwright.models.decoder.parallel_layer import ParallelLayer
from torchwright.models.decoder.rotary_cache import RotaryAngles
from torchwright.models.decoder.weights import LayerParts


class PostNormParts(LayerParts, Protocol):
    """The parts that a `PostNormLayer` is built from."""

    def layer_norm(self, layer: int, part: str) -> tuple[torch.Tensor, torch.Tensor]: ...
    def embedding_norm(self) -> tuple[torch.Tensor, torch.Tensor] | None: ...


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) · weight + shift over the last axis, in x's type (Ba et al., 2016)."""

    weight: torch.Tensor
    shift: torch.Tensor

    def __init__(self, weight_E: torch.Tensor, shift_E: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", weight_E)
        self.register_buffer("shift", shift_E)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        wide = F.layer_norm(x_TE.to(self.weight.dtype), self.weight.shape, self.weight, self.shift, self.eps)
        return wide.to(x_TE.dtype)


class CenteredNorm(LayerNorm):
    """The same without its output's mean, as layers with norms before their blocks want a stream (`stack_weights`)."""

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        wide = F.layer_norm(x_TE.to(self.weight.dtype), self.weight.shape, self.weight, self.shift, self.eps)
        return (wide - wide.mean(-1, keepdim=True)).to(x_TE.dtype)


class PostNormLayer(nn.Module):
    """Attention, perhaps attention to a memory, and feed-forward block (Vaswani et al., 2017, section 3.1).

    Called like `Layer`; between layers there is the stream alone.
    """

    memory: MemoryAttention | None
    unplanned = "blocks with a LayerNorm after them"

    def __init__(self, config: DecoderConfig, weights: PostNormParts, layer: int) -> None:
        super().__init__()
        self.attention, self.mlp = (
            PagedAttention(config, weights, layer),
            feed_forward(config, weights, layer),
        )
        self.memory = MemoryAttention(config, weights, layer) if config.remembers else None
        self.post_attention = LayerNorm(*weights.layer_norm(layer, "attention"), config.eps)
        self.post_memory = (
            LayerNorm(*weights.layer_norm(layer, "memory"), config.eps) if self.memory else None
        )
        self.post_mlp = LayerNorm(*weights.layer_norm(layer, "mlp"), config.eps)

    def forward(
        self, delta_TE: None, stream_TE: torch.Tensor, batch: Batch, angles: RotaryAngles, pages: LayerPages
    ) -> tuple[None, torch.Tensor]:
        stream_TE = self.post_attention(stream_TE + self.attention(stream_TE, batch, angles, pages))
        if self.memory is not None and self.post_memory is not None:
            stream_TE = self.post_memory(stream_TE + self.memory(stream_TE, batch))
        return None, self.post_mlp(stream_TE + self.mlp(stream_TE))


def layer_of(
    config: DecoderConfig, weights: LayerParts, layer: int
) -> Layer | PostNormLayer | InputLayer | ParallelLayer:
    """A layer with its norms where the configuration has them."""
    if config.layer_inputs is not None:
        return InputLayer(config, weights, layer)
    if config.parallel is not None:
        return ParallelLayer(config, weights, layer)
    if config.post_norm:
        return PostNormLayer(config, cast(PostNormParts, weights), layer)
    return Layer(config, weights, layer)


def embedding_norm(config: DecoderConfig, weights: LayerParts) -> LayerNorm | None:
    """The norm of what is embedded; where norms precede blocks, its output is made one without a mean."""
    if not (config.post_norm or config.embedding_norm):
        return None
    parts = cast(PostNormParts, weights).embedding_norm()
    if parts is None:
        return None
    return LayerNorm(*parts, config.eps) if config.post_norm else CenteredNorm(*parts, config.eps)
