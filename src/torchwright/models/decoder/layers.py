"""One decoder layer: attention or a recurrent part, a feed-forward block, and their norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchwright.models.decoder.attention import MemoryAttention, PagedAttention
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.feed_forward import GatedFeedForward, feed_forward
from torchwright.models.decoder.functional import ops
from torchwright.models.decoder.latent import LatentAttention
from torchwright.models.decoder.low_rank import LayerAdapters
from torchwright.models.decoder.pages import LayerPages
from torchwright.models.decoder.program import Cells, Program
from torchwright.models.decoder.recurrent import mixer
from torchwright.models.decoder.rotary_cache import RotaryAngles
from torchwright.models.decoder.states import LayerStates
from torchwright.models.decoder.weights import LayerParts


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
        """The reason for which no plan takes it (`plan.py`), or None."""
        blocks: list[Any] = [self.attention, self.mlp, *([] if self.memory is None else [self.memory])]
        return next((block.unplanned for block in blocks if block.unplanned), None)

    def plan(
        self,
        program: Program,
        delta: Cells | None,
        rotary: int,
        kept: LayerPages | LayerStates,
        memory: LayerPages | None = None,
    ) -> Cells:
        """Add to a program what `forward` does; `rotary` is the index of its rotary embedding."""
        attention: Any = self.attention
        x, out = program.join(delta, self.pre_attention), program.delta
        program.note(self.layer, program.stream)
        attention.plan(program, x, out, *([kept] if isinstance(kept, LayerStates) else [rotary, kept]))
        program.leave(self.post_attention, self.residual_scale)
        if self.memory is not None:
            assert memory is not None, "a decoder with a memory is planned without one"
            self.memory.plan(program, program.join(out, self.pre_memory), out, memory)
        x = program.join(out, self.pre_mlp)
        if isinstance(self.mlp, GatedFeedForward):
            self.mlp.plan(program, x, out, self.layer)
        else:
            self.mlp.plan(program, x, out)
        program.leave(self.post_mlp, self.residual_scale)
        return out

    def _leave(self, x_TE: torch.Tensor, norm_E: torch.Tensor | None) -> torch.Tensor:
        if norm_E is not None:
            x_TE = ops.rms_norm(x_TE, norm_E, self.eps)
        return x_TE if self.residual_scale == 1 else x_TE * self.residual_scale


def join(
    delta_TE: torch.Tensor | None, stream_TE: torch.Tensor, norm_E: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's input and the residual stream, once `delta_TE` (None before the first layer) is added to it."""
    if norm_E is not None and delta_TE is not None:
        return ops.add_rms_norm(delta_TE, stream_TE, norm_E, eps)
    if delta_TE is not None:
        stream_TE = stream_TE + delta_TE
    return (stream_TE if norm_E is None else ops.rms_norm(stream_TE, norm_E, eps)), stream_TE
