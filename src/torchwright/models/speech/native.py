"""An encoder and a decoder of `decoder/` as a speech model: all windows share one cache and one memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from torchwright.hardware.kernels.cpu.threads import own_threads, torch_threads
from torchwright.models.decoder.cache import PAGE, CacheSequence, PagedCache
from torchwright.models.decoder.memory import Memory
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.seq2seq.encoder import Encoder
from torchwright.models.speech.steps import Encoded, Head, SpeechModel, Steps, keep
from torchwright.models.speech.transcript import MOST_WINDOWS


class Pages:
    """A sequence of a cache, which has its pages back once nobody holds this."""

    def __init__(self, sequence: CacheSequence, free: Callable[[CacheSequence], None]) -> None:
        self.sequence = sequence
        weakref.finalize(self, free, sequence)


class NativeSpeech(SpeechModel):
    """Speech model on Torchwright's kernels. A window's tokens are bitwise independent of the rest of the batch."""

    def __init__(
        self,
        stem: nn.Module,
        encoder: Encoder,
        decoder: Decoder,
        description: str,
        windows: int = MOST_WINDOWS,
    ) -> None:
        """`stem` makes of a window's input (1, …) what the encoder takes (S, E)."""
        self.stem, self.encoder, self.decoder, self.description = stem, encoder, decoder, description
        config, dtype = decoder.config, decoder.embedding.dtype
        room, encoded = -(-config.context // PAGE), -(-encoder.config.context // PAGE)
        # The system gives pages their memory when they are first written.
        self._memory = Memory(decoder, pages=windows * encoded, dtype=dtype)
        self._cache = PagedCache(config, pages=windows * room, dtype=dtype)

    def encode(self, input_1: torch.Tensor) -> Pages:
        """Keys and values of the encoder's states for every layer of the decoder.

        Raises `CacheFull` where more windows are held than there is room for.
        """
        with self._on_threads():
            return self.remember(self.states(input_1))

    def remember(self, states_SE: torch.Tensor) -> Pages:
        """Keys and values of states; raises `CacheFull` as `encode` does."""
        return Pages(self._memory.write(states_SE), self._memory.free)

    def states(self, input_1: torch.Tensor) -> torch.Tensor:
        """The encoder's output (S, E)."""
        return self.encoder(self.stem(input_1))

    def steps(self, encoded: Encoded) -> Steps:
        return Steps(self, encoded, Pages(self._cache.sequence(0), self._cache.free))

    def rewind(self, steps: Steps, length: int) -> None:
        """Forget what was read after the first `length` tokens."""
        self._cache.rewind(steps.kept.sequence, length)

    def read(self, pieces: Sequence[tuple[Steps, Sequence[int]]]) -> list[torch.Tensor]:
        """See `SpeechModel.read`; raises `CacheFull` where the tokens of all windows have no room."""
        batch = self._cache.append([(steps.kept.sequence, ids) for steps, ids in pieces])
        memory = self._memory.of([steps.encoded.sequence for steps, _ in pieces])
        with self._on_threads():
            hidden_TE = self.decoder(replace(batch, memory=memory), self._cache)
        return [hidden_TE[start:stop] for start, stop in pairwise(batch.query_starts.tolist())]

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        with self._on_threads():
            return self.decoder.logits(hidden_NE)

    def cross_attention(self, heads: Sequence[Head], ids: Sequence[int], encoded: Encoded) -> torch.Tensor:
        queries = dict[int, torch.Tensor]()
        with ExitStack() as hooks:
            for layer in {layer for layer, _ in heads}:
                memory = self.decoder.get_submodule(f"layers.{layer}.memory.q")
                hooks.callback(memory.register_forward_hook(partial(keep, queries, layer)).remove)
            self.steps(encoded).read(ids)
        config, found = self.decoder.config, []
        for layer, head in heads:
            q_THD = queries[layer].unflatten(1, (config.heads, config.head_dim)).float()
            k_SD = self._memory.keys(layer, encoded.sequence)[head // config.groups].float()
            found.append(q_THD[:, head] @ k_SD.T * config.scale)
        return torch.stack(found)

    def _on_threads(self) -> AbstractContextManager[Any]:
        """The kernels' own threads where they do all that takes long, else PyTorch's."""
        return own_threads() if self._packed else torch_threads(None)

    @cached_property
    def module(self) -> nn.Module:
        return nn.ModuleDict({"stem": self.stem, "encoder": self.encoder, "decoder": self.decoder})

    @cached_property
    def _packed(self) -> bool:
        return not any(isinstance(part, nn.Linear) for part in self.module.modules())
