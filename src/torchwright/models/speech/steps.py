"""The model interface of recognizers: an encoder of windows, and a decoder with cross-attention to its states.

encoded = model.encode(features)                    once a window
steps = model.steps(encoded)                        a decoder that has read nothing, any number for one window
hidden_TE = steps.read([1, 2, 3])
logits_V = steps.logits(hidden_TE[-1])
hidden = model.read([(steps, [4]), (other, [7])]) several at once, each as it would be alone

`TransformersSpeech` is any of transformers' models; `native.py` runs on Torchwright's kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from torchwright.workloads.huggingface import cache_keyword

Head = tuple[int, int]
"""A decoder layer and one of its heads."""
Encoded = Any
"""The encoder's output for the decoder, valid while it is referenced."""


class SpeechModel(ABC):
    """An encoder and a decoder with a cache."""

    description: str
    """Description of the back end, for people."""
    module: Any
    """The `nn.Module` that holds the weights."""

    @abstractmethod
    def encode(self, input_1: torch.Tensor) -> Encoded:
        """Encode one window: features (1, M, frames) or samples (1, T), as the family takes them, in float32."""

    @abstractmethod
    def steps(self, encoded: Encoded) -> Steps:
        """A decoder that has read nothing yet."""

    @abstractmethod
    def read(self, pieces: Sequence[tuple[Steps, Sequence[int]]]) -> list[torch.Tensor]:
        """The decoder's output (T, E) after more tokens of each, which are as many as there are ids. Different ones."""

    @abstractmethod
    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) in float32 of what follows outputs (..., E)."""

    @abstractmethod
    def cross_attention(self, heads: Sequence[Head], ids: Sequence[int], encoded: Encoded) -> torch.Tensor:
        """Return each head's cross-attention scores per token and encoder state, before softmax: (H, T, S), float32."""


class Steps:
    """A decoder over one window; `kept` is what it has read, as its model keeps it."""

    def __init__(self, model: SpeechModel, encoded: Encoded, kept: Any) -> None:
        self.model, self.encoded, self.kept = model, encoded, kept

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """The decoder's output (T, E) after more tokens."""
        return self.model.read([(self, ids)])[0]

    def logits(self, hidden_E: torch.Tensor) -> torch.Tensor:
        """Logits (V,) in float32 of what follows one output."""
        return self.model.logits(hidden_E)


class TransformersSpeech(SpeechModel):
    """transformers' own modules and cache, one window after the other."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.dtype = next(module.parameters()).dtype
        self.description = f"transformers, {str(self.dtype).removeprefix('torch.')}"
        self._decoder, self._head = module.get_decoder(), module.get_output_embeddings()

    def encode(self, input_1: torch.Tensor) -> torch.Tensor:
        return self.module.get_encoder()(input_1.to(self.dtype)).last_hidden_state

    def steps(self, encoded: torch.Tensor) -> Steps:
        return Steps(self, encoded, EncoderDecoderCache(DynamicCache(), DynamicCache()))

    def read(self, pieces: Sequence[tuple[Steps, Sequence[int]]]) -> list[torch.Tensor]:
        return [self._read(steps, ids) for steps, ids in pieces]

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return self._head(hidden_NE).float()

    def cross_attention(
        self, heads: Sequence[Head], ids: Sequence[int], encoded: torch.Tensor
    ) -> torch.Tensor:
        queries, keys = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        with ExitStack() as hooks:
            for layer in {layer for layer, _ in heads}:
                attention = self._decoder.layers[layer].encoder_attn
                for module, kept in ((attention.q_proj, queries), (attention.k_proj, keys)):
                    hooks.callback(module.register_forward_hook(partial(keep, kept, layer)).remove)
            self._decoder(input_ids=torch.tensor([list(ids)]), encoder_hidden_states=encoded, use_cache=False)
        found = []
        for layer, head in heads:
            attention = self._decoder.layers[layer].encoder_attn
            part = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
            q_TD, k_SD = queries[layer][0, :, part].float(), keys[layer][0, :, part].float()
            found.append(q_TD @ k_SD.T * attention.scaling)
        return torch.stack(found)

    def _read(self, steps: Steps, ids: Sequence[int]) -> torch.Tensor:
        out = self._decoder(
            input_ids=torch.tensor([list(ids)]),
            encoder_hidden_states=steps.encoded,
            use_cache=True,
            **{cache_keyword(self._decoder): steps.kept},
        )
        return out.last_hidden_state[0]


def keep(kept: dict[int, torch.Tensor], layer: int, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
    """A forward hook that notes a layer's output."""
    kept[layer] = output
