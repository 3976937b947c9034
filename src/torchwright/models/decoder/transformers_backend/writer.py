"""Text generation on transformers' own code, for families that the native decoder does not know.

One prompt at a time, in PyTorch's eager mode: several times slower than the native decoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.core.errors import WorkloadError
from torchwright.models.decoder.generation.sampling import Sampler, Sampling
from torchwright.models.decoder.generation.text import FolderTokenizer
from torchwright.models.decoder.shown import EncodesPictures, Shown
from torchwright.models.decoder.transformers_backend.pictures import (
    PictureForm,
    handed,
    positions,
    prompt_arguments,
)
from torchwright.workloads.generation import check_ids

CACHES = ("cache", "past_key_values", "cache_params", "state")
"""Arguments in which models of transformers take their cache, the newest name first."""
PROBE = (5, 3)
"""Tokens of the prompt and of the answer in the check of a model's cache."""
TOLERANCE = 1e-2
"""Largest difference of logits with a cache, relative to the largest logit; bfloat16 rounds to 4e-3."""


def first_token(config: Any) -> int | None:
    """Return the token before a text, the first one where a configuration names several, None where it names none."""
    ids = getattr(config, "bos_token_id", None)
    return next(iter(ids), None) if isinstance(ids, list | tuple) else ids


class TransformersWriter:
    """A causal language model of transformers; see `Writer` (`workloads/generation.py`)."""

    sampling = frozenset(field.name for field in fields(Sampling))
    chunk = 1

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        *,
        context: int,
        stop: Sequence[int],
        vision: EncodesPictures | None = None,
        form: PictureForm | None = None,
    ) -> None:
        """`vision` encodes pictures, and `form` is the form in which the model takes them (`pictures.py`)."""
        self.vision, self._form = vision, form
        config: Any = model.config
        self._folder, self._bos = folder, first_token(config)
        self._model, self.longest, self.stop = model, context, tuple(stop)
        self.vocabulary: int = config.get_text_config().vocab_size
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        takes = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._takes_positions = "position_ids" in takes
        self._cache_name = next((name for name in CACHES if name in takes), None)
        self.cached, self.cache_bytes = True, 0
        self.cached, self.cache_bytes = self._probe()

    @cached_property
    def _text(self) -> FolderTokenizer:
        return FolderTokenizer(self._folder, bos=self._bos)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self._text.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self._text.decode(ids)

    def room(self, tokens: int) -> int:
        """Return how many new tokens fit after a prompt."""
        return self.longest - tokens

    def write(
        self,
        ids: list[int],
        limit: int,
        *,
        seed: int,
        on_token: Callable[[int], None],
        pictures: Sequence[Any] = (),
        **sampling: Any,
    ) -> None:
        """See `Writer.write`. Raises `WorkloadError` for a prompt that is empty or does not fit."""
        sampler = Sampler(Sampling.of(sampling), ids, seed)
        if len(ids) + limit > self.longest:
            raise WorkloadError(
                f"the prompt ({len(ids)} tokens) and {limit} new tokens do not fit",
                allowed=f"{self.longest} tokens together",
            )
        session = self.session(ids, self.show(ids, pictures))
        logits_V = session.prefill() if limit else torch.empty(0)
        for place in range(limit):
            token = sampler(logits_V)
            if token in self.stop:
                return
            on_token(token)
            if place + 1 < limit:
                logits_V = session.advance(token)

    @torch.inference_mode()
    def __call__(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, V) in float32 of token ids (B, T)."""
        given = {"input_ids": ids_BT.to(self.device), **self._positions(0, ids_BT.shape[1])}
        return self._model(**given, **self._use_cache(False)).logits.float().cpu()

    def show(self, ids: Sequence[int], pictures: Sequence[Any]) -> Shown | None:
        """Encode a prompt's pictures. Raises `WorkloadError` for a model that takes none, or other places."""
        if not pictures:
            return None
        if self.vision is None:
            raise WorkloadError(f"the model in {self._folder} takes text alone", found="pictures")
        return Shown.of(self.vision, ids, pictures)

    def session(self, ids: Sequence[int], shown: Shown | None = None) -> TransformersSession:
        """Return a session that continues one prompt token by token. Raises `WorkloadError` for unusable ids."""
        check_ids(ids, self.vocabulary)
        return TransformersSession(self, ids, shown)

    @torch.inference_mode()
    def next_logits(
        self, ids: Sequence[int], cache: Any, start: int = 0, shown: Shown | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Return the logits (V,) in float32 behind the given tokens, and the cache that has them.

        `cache` holds the `start` tokens before `ids`; None means an empty cache. `shown` are the prompt's pictures.
        """
        kept = {self._cache_name: cache} if self.cached and self._cache_name else {}
        output = self._model(
            **self._tokens(ids, start, shown),
            **self._use_cache(self.cached),
            **self._last_only,
            **kept,
        )
        after = getattr(output, self._cache_name, None) if kept and self._cache_name else None
        return output.logits[0, -1].float().cpu(), after

    def _tokens(self, ids: Sequence[int], start: int, shown: Shown | None) -> dict[str, Any]:
        """The arguments of tokens from place `start` on; a prompt's pictures are handed over with its beginning."""
        if shown is not None and self.vision is not None and self._form is not None and not start:
            found = prompt_arguments(self._model, ids, self.vision.tokens, shown.axes, self._form)
            return self._positions(0, len(ids)) | found | handed(shown.embedded, self._form)
        found: dict[str, Any] = {"input_ids": torch.tensor([list(ids)], device=self.device)}
        if shown is not None and shown.axes is not None:
            return found | {
                "position_ids": positions(shown.axes, range(start, start + len(ids)), self.device)
            }
        return found | self._positions(start, len(ids))

    def _positions(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """The positions as transformers' `generate` gives them; some models count otherwise where none are given."""
        if not self._takes_positions:
            return {}
        return {"position_ids": torch.arange(start, start + count, device=self.device)[None]}

    def _use_cache(self, used: bool) -> dict[str, bool]:
        return {"use_cache": used} if self._cache_name else {}

    def _probe(self) -> tuple[bool, int]:
        """Check that the cache gives the logits of a whole pass; return whether it does, and its bytes when full."""
        ids = torch.randint(
            self.vocabulary, (sum(PROBE),), generator=torch.Generator().manual_seed(0)
        ).tolist()
        expected_V = self(torch.tensor([ids]))[0, -1]
        if self._cache_name is None:
            return False, 0
        try:
            logits_V, cache = self.next_logits(ids[: PROBE[0]], None)
            before = _bytes_of(cache)
            for place in range(PROBE[0], sum(PROBE)):
                logits_V, cache = self.next_logits([ids[place]], cache, place)
        except Exception:  # whatever a model's own code raises: it has no cache that can be used
            return False, 0
        if cache is None:
            return False, 0
        growth = max(0, _bytes_of(cache) - before) / PROBE[1]
        scale = max(1.0, float(expected_V.abs().max()))
        same = bool((logits_V - expected_V).abs().max() <= TOLERANCE * scale)
        return same, int(before + growth * self.longest)


class TransformersSession:
    """One prompt's cache, read once and grown token by token."""

    def __init__(self, writer: TransformersWriter, ids: Sequence[int], shown: Shown | None) -> None:
        self._writer, self._ids, self._shown = writer, list(ids), shown
        self._cache: Any = None

    def prefill(self) -> torch.Tensor:
        """Read the prompt and return the next token's logits (V,) in float32."""
        logits_V, self._cache = self._writer.next_logits(self._ids, None, shown=self._shown)
        return logits_V

    def advance(self, token: int) -> torch.Tensor:
        """Append a token and return the next one's logits (V,) in float32."""
        self._ids.append(token)
        ids = [token] if self._writer.cached else self._ids
        start = len(self._ids) - len(ids)
        logits_V, self._cache = self._writer.next_logits(ids, self._cache, start, self._shown)
        return logits_V


def _bytes_of(value: Any) -> int:
    """Return the bytes of the tensors in a cache, counting each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in _tensors(value, set())}
    return sum(storages.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
    for part in [
        *parts,
        *(vars(value).values() if type(value).__module__.startswith("transformers") else ()),
    ]:
        yield from _tensors(part, seen)
