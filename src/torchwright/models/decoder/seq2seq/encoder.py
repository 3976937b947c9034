"""An encoder: the decoder's layers, in which every token sees all others, over pages that last for one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from torchwright.models.decoder.cache import PAGE, PagedCache
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.layers import join
from torchwright.models.decoder.post_norm import layer_of
from torchwright.models.decoder.rotary_cache import RotaryCache
from torchwright.models.decoder.weights import LayerParts


class EncoderParts(LayerParts, Protocol):
    """The parts that an `Encoder` is built from."""

    def final_norm(self) -> torch.Tensor | None: ...
    def final_shift(self) -> torch.Tensor | None: ...


class Encoder(nn.Module):
    """From what is embedded (S, E) to states (S, E), in its type; any number of tokens, of one sequence or several."""

    norm: torch.Tensor | None
    shift: torch.Tensor | None

    def __init__(self, config: DecoderConfig, weights: EncoderParts) -> None:
        super().__init__()
        assert not config.causal, "an encoder's tokens see all others"
        self.config = config
        self.layers = nn.ModuleList()
        for layer in range(config.layers):
            self.layers.append(layer_of(config, weights, layer))
            weights.release()
        self.rotary = RotaryCache(config)
        self.register_buffer("norm", weights.final_norm())
        self.register_buffer("shift", weights.final_shift())

    def forward(self, stream_SE: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """`lengths` are those of sequences that lie one after another; what each becomes does not depend on others."""
        lengths = [len(stream_SE)] if lengths is None else lengths
        # One layer's pages: the next writes over what the last has read.
        config, pages = replace(self.config, layers=1), sum(-(-count // PAGE) for count in lengths)
        scratch = PagedCache(config, pages=pages, dtype=stream_SE.dtype, device=stream_SE.device)
        batch = scratch.append([(scratch.sequence(count), range(count)) for count in lengths])
        delta_SE = None
        for layer, angles in zip(self.layers, self.rotary.by_layer(batch), strict=True):
            delta_SE, stream_SE = layer(delta_SE, stream_SE, batch, angles, scratch.layers[0])
        states_SE = join(delta_SE, stream_SE, self.norm, self.config.eps)[0]
        return states_SE if self.shift is None else states_SE + self.shift
