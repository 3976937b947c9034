"""An encoder and a decoder of text as one call: sources read once, then tokens one at a time from a cache.

The tokens are given, so that every model makes the same calls: `Answers` by transformers' modules and growing caches,
`NativeAnswers` by Torchwright's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from torchwright.models.decoder.seq2seq.packed import read_packed, write_packed
from torchwright.models.decoder.seq2seq.rules import GenerationRules
from torchwright.models.decoder.seq2seq.translator import LoadedSeq2Seq
from torchwright.workloads.huggingface import cache_keyword


class Answers(nn.Module):
    """transformers' own way: forward(ids_BS, mask_BS, target_BN) → logits (B, N, V) after each token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BS: torch.Tensor, mask_BS: torch.Tensor, target_BN: torch.Tensor) -> torch.Tensor:
        read = self._reader(ids_BS, mask_BS)
        return torch.stack([read(token_B) for token_B in target_BN.unbind(1)], 1)

    def greedy(
        self, ids_BS: torch.Tensor, mask_BS: torch.Tensor, count: int, rules: GenerationRules
    ) -> torch.Tensor:
        """Target (B, count): the start, and what the model answers itself; what follows its end is arbitrary."""
        read, target = self._reader(ids_BS, mask_BS), [torch.full((len(ids_BS),), rules.start)]
        for place in range(count - 1):
            logits_BV, forced = read(target[-1]), rules.forced(place, count)
            logits_BV[:, list(rules.banned)] = -torch.inf
            target.append(logits_BV.argmax(-1) if forced is None else torch.full_like(target[0], forced))
        return torch.stack(target, 1)

    def _reader(self, ids_BS: torch.Tensor, mask_BS: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the logits (B, V) after one more token (B,) of each."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        encoded = self.model.get_encoder()(input_ids=ids_BS, attention_mask=mask_BS)
        past = EncoderDecoderCache(DynamicCache(), DynamicCache())
        keyword = cache_keyword(self.model)

        def read(token_B: torch.Tensor) -> torch.Tensor:
            return self.model(
                encoder_outputs=encoded,
                attention_mask=mask_BS,
                decoder_input_ids=token_B[:, None],
                use_cache=True,
                **{keyword: past},
            ).logits[:, 0]

        return read


class NativeAnswers(nn.Module):
    """Called like `Answers`."""

    def __init__(self, loaded: LoadedSeq2Seq) -> None:
        super().__init__()
        self.loaded = loaded
        self.embedding, self.encoder, self.decoder = loaded.embedding, loaded.encoder, loaded.decoder

    @classmethod
    def load(cls, folder: Path, model_folder: Path) -> Self:
        """Load what `save` wrote."""
        return cls(read_packed(folder, model_folder))

    def save(self, folder: Path) -> None:
        write_packed(self.loaded, folder)

    def forward(self, ids_BS: torch.Tensor, mask_BS: torch.Tensor, target_BN: torch.Tensor) -> torch.Tensor:
        sources = [ids_S[mask_S > 0].tolist() for ids_S, mask_S in zip(ids_BS, mask_BS, strict=True)]
        return self.loaded.follow(sources, target_BN.tolist())
