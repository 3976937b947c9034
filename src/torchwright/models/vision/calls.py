"""A question about a picture as one call: the picture is encoded, the prompt read, then tokens one at a time.

The tokens are given, so that every model makes the same calls: `Answers` by transformers' modules and growing caches,
`NativeAnswers` by Torchwright's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from torchwright.models.decoder.generation.generate import PREFILL_CHUNK, LoadedDecoder
from torchwright.models.decoder.packed import read_packed, write_packed
from torchwright.models.decoder.shown import Shown, with_pictures
from torchwright.models.vision.packed import KeptEncoder, write_encoder
from torchwright.models.vision.record import picture_of
from torchwright.workloads.huggingface import cache_keyword

MARKS = ("mm_token_type_ids", "token_type_ids")
"""Arguments of transformers' models that say which tokens stand for a picture."""


class Answers(nn.Module):
    """transformers' own way: forward(ids_1T, target_1N, **arrays) → logits (1, N, V) before each token."""

    def __init__(self, model: Any, token: int) -> None:
        super().__init__()
        self.model, self.token = model, token

    def forward(self, ids_1T: torch.Tensor, target_1N: torch.Tensor, **arrays: torch.Tensor) -> torch.Tensor:
        given = iter(target_1N.unbind(1))
        found = self._logits(ids_1T, arrays, given)
        return torch.stack(
            [logits_1V for logits_1V, _ in zip(found, range(target_1N.shape[1]), strict=False)], 1
        )

    def greedy(self, ids_1T: torch.Tensor, count: int, **arrays: torch.Tensor) -> torch.Tensor:
        """Return the model's own answer (1, count)."""
        said: list[torch.Tensor] = []
        for logits_1V in self._logits(ids_1T, arrays, (said[-1] for _ in range(count))):
            said.append(logits_1V.argmax(-1))
            if len(said) == count:
                break
        return torch.stack(said, 1)

    def _logits(
        self, ids_1T: torch.Tensor, arrays: dict[str, torch.Tensor], given: Iterator[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Logits (1, V) after the prompt, then after each given token (1,)."""
        takes = inspect.signature(self.model.forward).parameters
        marks = {name: (ids_1T == self.token).int() for name in MARKS if name in takes}
        out = self.model(input_ids=ids_1T, **arrays, **marks, use_cache=True, logits_to_keep=1)
        keyword = cache_keyword(self.model)
        yield out.logits[:, -1]
        for token_1 in given:
            out = self.model(
                input_ids=token_1[:, None],
                use_cache=True,
                logits_to_keep=1,
                **{keyword: getattr(out, keyword)},
            )
            yield out.logits[:, -1]


class NativeAnswers(nn.Module):
    """Called like `Answers`."""

    def __init__(self, loaded: LoadedDecoder) -> None:
        super().__init__()
        self.loaded, self.vision = loaded, loaded.vision
        vision: Any = loaded.vision
        self.encoder, self.decoder = vision.model, loaded.decoder

    @classmethod
    def load(cls, folder: Path, model_folder: Path) -> Self:
        """Load what `save` wrote; `model_folder` holds config.json, tokenizer and processor."""
        loaded = read_packed(folder, model_folder)
        loaded.vision = KeptEncoder(folder, model_folder)
        return cls(loaded)

    def save(self, folder: Path) -> None:
        write_packed(self.loaded, folder)
        write_encoder(self.encoder, self.loaded.folder, folder)

    @torch.inference_mode()
    def forward(self, ids_1T: torch.Tensor, target_1N: torch.Tensor, **arrays: torch.Tensor) -> torch.Tensor:
        assert self.vision is not None
        ids, target = ids_1T[0].tolist(), target_1N[0].tolist()
        picture = picture_of(
            {name: array.numpy() for name, array in arrays.items()}, ids.count(self.vision.tokens[0])
        )
        shown = Shown.of(self.vision, ids, [picture])
        cache = self.loaded.new_cache([len(ids) + len(target)])
        sequence = cache.sequence(len(ids), shown.axes)
        found: list[torch.Tensor] = []
        with self.loaded.on_threads():
            while sequence.length < len(ids) + len(target) - 1:
                start = sequence.length
                stop = shown.places.end(start, min(start + PREFILL_CHUNK, len(ids)))
                piece = ids[start:stop] or [target[start - len(ids)]]
                batch = with_pictures(cache.append([(sequence, piece)]), [(shown, start, len(piece))])
                logits = self.decoder.answer(batch, cache, batch.last_rows_B)
                if sequence.length >= len(ids):
                    found.append(logits.values_NV)
        return torch.stack(found, 1)
