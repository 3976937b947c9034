"""A loaded decoder: logits of token ids, and text or tokens that continue prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from torchwright.core.errors import WorkloadError
from torchwright.hardware.kernels.cpu.threads import own_threads, torch_threads
from torchwright.models.decoder.batch import with_adapters
from torchwright.models.decoder.cache import PAGE, CacheSequence, PagedCache
from torchwright.models.decoder.config import DecoderConfig, PagedConfig
from torchwright.models.decoder.generation.sampling import Sampler, Sampling
from torchwright.models.decoder.generation.text import FolderTokenizer, TextStream
from torchwright.models.decoder.low_rank import Adapter
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.paged_model import PagedModel
from torchwright.models.decoder.scores import Logits
from torchwright.models.decoder.shown import EncodesPictures, Shown, with_pictures
from torchwright.workloads.generation import as_list

Model = TypeVar("Model", bound=PagedModel)
PREFILL_CHUNK = 512
"""Tokens of one forward call at most, over all sequences: what bounds the memory of activations."""


class LoadedPagedModel(Generic[Model]):
    """A language model over a paged cache, with its tokenizer.

    model.logits(ids_BT)                                    float32 (B, T, V)
    model.generate("Once upon a time", max_new_tokens=64)   the continuation, as text
    model.generate([[1, 2], [3]], temperature=0.8, seed=7)  as lists of token ids
    for piece in model.stream("Once"): …                    text as it appears
    """

    sampling = frozenset(field.name for field in fields(Sampling))

    def __init__(
        self,
        decoder: Model,
        folder: Path,
        *,
        kv_dtype: torch.dtype,
        stop: tuple[int, ...],
        stored: str | None = None,
    ) -> None:
        self.decoder, self.folder, self.kv_dtype, self.stop = decoder, folder, kv_dtype, stop
        self.stored = stored
        """The format of a quantized checkpoint, and how its weights are kept, in words."""
        self.threads: int | None = None
        """Threads to compute on; None is as many as PyTorch's pool has."""
        self.vision: EncodesPictures | None = None
        """The vision encoder, for prompts with pictures."""

    @property
    def config(self) -> PagedConfig:
        return self.decoder.config

    @cached_property
    def text(self) -> FolderTokenizer:
        """The tokenizer, read when text is first used."""
        return FolderTokenizer(self.folder, self.config.bos)

    @property
    def device(self) -> torch.device:
        """The device of the model; token ids are taken and returned on the CPU."""
        return self.decoder.embedding.device

    def new_cache(self, tokens: Sequence[int], *, copies: int = 0) -> PagedCache:
        """A cache with room for sequences of these lengths, and for so many copies of states."""
        pages = sum(-(-count // PAGE) for count in tokens)
        return PagedCache(
            self.config, pages=pages, dtype=self.kv_dtype, device=self.device, states=len(tokens) + copies
        )

    @torch.inference_mode()
    def logits(
        self, ids_BT: torch.Tensor, *, prefill_chunk: int = PREFILL_CHUNK, adapter: Adapter | None = None
    ) -> torch.Tensor:
        """Logits (B, T, V) in float32 of token ids (B, T), each row a sequence of its own; `adapter` is for all rows.

        Raises `WorkloadError` for ids out of range, an empty input, or more tokens than the model's context.
        """
        if ids_BT.ndim != 2 or not ids_BT.numel() or ids_BT.dtype.is_floating_point:
            raise WorkloadError(
                f"the input is {list(ids_BT.shape)} of {ids_BT.dtype}",
                allowed="integer token ids (B, T), neither of them 0",
            )
        rows = [self._checked(ids, new=0) for ids in ids_BT.tolist()]
        cache = self.new_cache([len(ids) for ids in rows])
        sequences = [cache.sequence(len(ids)) for ids in rows]
        logits_BTV = torch.empty(*ids_BT.shape, self.config.vocabulary, device=cache.device)
        for chunk in _chunks(rows, prefill_chunk):
            batch = cache.append([(sequences[row], rows[row][start:stop]) for row, start, stop in chunk])
            batch = with_adapters(batch, [(adapter, len(batch.ids_T))])
            with self.on_threads():
                logits_TV = self.decoder.logits(self.decoder(batch, cache))
            parts = logits_TV.split([stop - start for _, start, stop in chunk])
            for (row, start, stop), part in zip(chunk, parts, strict=True):
                logits_BTV[row, start:stop] = part
        return logits_BTV

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 64,
        seed: int | Sequence[int] = 0,
        stop: Sequence[int] | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        pictures: Sequence[Sequence[Any]] | None = None,
        adapter: Adapter | None = None,
        **sampling: Any,
    ) -> Any:
        """Continue each prompt, a text or token ids, until a stop token or `max_new_tokens`.

        Returns texts for texts, lists of ids for ids, and one of them for one prompt; the stop token is left out.
        `sampling` takes the fields of `Sampling` (temperature, top_k, …); the default is greedy. `seed` is one for each
        prompt, or one number from which each gets its own. `stop` replaces the model's end-of-text ids; an empty list
        never stops. A forward call takes at most `prefill_chunk` tokens. `pictures` are those of each prompt
        (`models/vision`), whose places the prompt has. `adapter` (`read_adapter`) is for all prompts.

        Raises `WorkloadError` for an empty prompt, ids or options out of range, or a prompt that with the new tokens
        does not fit the context. Raises `UnknownName` for an option that does not exist.
        """
        items, single = as_list(prompts)
        texts = isinstance(items[0], str)
        rows = [self.text.encode(item) if texts else item for item in items]
        outputs: list[list[int]] = [[] for _ in rows]
        for row, token in self.tokens(
            rows, max_new_tokens, seed, stop, prefill_chunk, Sampling.of(sampling), pictures, adapter
        ):
            outputs[row].append(token)
        results = [self.text.decode(ids) for ids in outputs] if texts else outputs
        return results[0] if single else results

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 64,
        seed: int = 0,
        stop: Sequence[int] | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        **sampling: Any,
    ) -> Iterator[str]:
        """The continuation of one prompt in pieces of text as they appear; options and errors are `generate`'s.

        A piece never ends within a character.
        """
        items, single = as_list(prompt)
        if not single:
            raise WorkloadError("stream takes one prompt", found=f"a list of {len(items)}")
        ids = self.text.encode(items[0]) if isinstance(items[0], str) else items[0]
        tokens = self.tokens([ids], max_new_tokens, seed, stop, prefill_chunk, Sampling.of(sampling))
        return self._pieces(tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.text.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.text.decode(ids)

    def room(self, tokens: int) -> int:
        """Return the number of new tokens that fit after a prompt of `tokens`."""
        return self.config.context - tokens

    def write(
        self,
        ids: list[int],
        limit: int,
        *,
        seed: int,
        on_token: Callable[[int], None],
        pictures: Sequence[Any] = (),
        adapter: Adapter | None = None,
        **sampling: Any,
    ) -> None:
        """See `Writer.write` (`workloads/generation.py`); options and errors are `generate`'s."""
        options = (PREFILL_CHUNK, Sampling.of(sampling), [pictures] if pictures else None, adapter)
        for _, token in self.tokens([ids], limit, seed, None, *options):
            on_token(token)

    def _pieces(self, tokens: Iterator[tuple[int, int]]) -> Iterator[str]:
        stream = TextStream(self.text)
        for _, token in tokens:
            if piece := stream.put(token):
                yield piece
        if piece := stream.rest():
            yield piece

    def tokens(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        seed: int | Sequence[int],
        stop: Sequence[int] | None,
        chunk: int,
        sampling: Sampling,
        pictures: Sequence[Sequence[Any]] | None = None,
        adapter: Adapter | None = None,
    ) -> Iterator[tuple[int, int]]:
        """(row, token) as tokens appear: what `generate` and `stream` are made of, for token ids.

        Arguments are checked before the first is asked for; the errors are `generate`'s.
        """
        for option, value, least in (("max_new_tokens", max_new_tokens, 0), ("prefill_chunk", chunk, 1)):
            if value < least:
                raise WorkloadError(f"{option} {value}", allowed=f"{least} or more")
        rows = [self._checked(ids, new=max_new_tokens) for ids in prompts]
        samplers = [
            Sampler(sampling, ids, row_seed)
            for ids, row_seed in zip(rows, seeds_of(seed, len(rows)), strict=True)
        ]
        ends = set(self.stop if stop is None else stop)
        shown = self._shown(rows, pictures, new=max_new_tokens)
        return self._steps(rows, shown, adapter, samplers, max_new_tokens, ends, chunk)

    def _steps(
        self,
        rows: list[list[int]],
        shown: list[Shown | None],
        adapter: Adapter | None,
        samplers: list[Sampler],
        max_new_tokens: int,
        ends: set[int],
        chunk: int,
    ) -> Iterator[tuple[int, int]]:
        if not max_new_tokens:
            return
        cache = self.new_cache([len(ids) + max_new_tokens for ids in rows])
        sequences = [
            cache.sequence(len(ids), one.axes if one else None) for ids, one in zip(rows, shown, strict=True)
        ]
        texts = [list(ids) for ids in rows]
        alive = list(range(len(rows)))
        for step in range(max_new_tokens):
            with self.on_threads():
                logits = self._advance(cache, sequences, texts, shown, adapter, alive, chunk)
            logits = logits.fetched(range(len(alive)))
            for place, row in enumerate(list(alive)):
                token = samplers[row](*logits.row(place))
                if token in ends:
                    alive.remove(row)
                    cache.free(sequences[row])
                    continue
                texts[row].append(token)
                yield row, token
            if not alive or step + 1 == max_new_tokens:
                return

    @torch.inference_mode()
    def _advance(
        self,
        cache: PagedCache,
        sequences: list[CacheSequence],
        texts: list[list[int]],
        shown: list[Shown | None],
        adapter: Adapter | None,
        alive: list[int],
        chunk: int,
    ) -> Logits:
        """Compute what the cache lacks of each text; logits of the last tokens, a row for each."""
        for row in alive:
            if self.config.restarts_at(sequences[row].prompt_tokens, len(texts[row])):
                cache.free(sequences[row])
                sequences[row] = cache.sequence(len(texts[row]))
        missing = [texts[row][sequences[row].length :] for row in alive]
        found: list[Logits] = []

        def end(place: int, start: int, stop: int) -> int:
            one, known = shown[alive[place]], len(texts[alive[place]]) - len(missing[place])
            return stop if one is None else one.places.end(known + start, known + stop) - known

        for part in _chunks(missing, chunk, end):
            pieces = [(sequences[alive[place]], missing[place][start:stop]) for place, start, stop in part]
            starts = [sequence.length for sequence, _ in pieces]
            batch = with_pictures(
                cache.append(pieces),
                [
                    (shown[alive[place]], first, stop - start)
                    for (place, start, stop), first in zip(part, starts, strict=True)
                ],
            )
            batch = with_adapters(batch, [(adapter, len(batch.ids_T))])
            done = [stop == len(missing[place]) for place, _, stop in part]
            rows_N = batch.last_rows_B
            if not all(done):
                rows_N = rows_N[torch.tensor(done, device=rows_N.device)]
            found.append(self.decoder.answer(batch, cache, rows_N))
        if len(found) == 1:
            return found[0]
        return Logits(torch.cat([logits.values_NV for logits in found]))

    def _shown(
        self, rows: list[list[int]], pictures: Sequence[Sequence[Any]] | None, *, new: int
    ) -> list[Shown | None]:
        """Encode each prompt's pictures. Raises `WorkloadError` for a model that takes none, or other places."""
        if pictures is None:
            return [None for _ in rows]
        if self.vision is None:
            raise WorkloadError(f"the model in {self.folder} takes text alone", found="pictures")
        if len(pictures) != len(rows):
            raise WorkloadError(f"pictures for {len(pictures)} of {len(rows)} prompts")
        found = [
            Shown.of(self.vision, ids, own) if own else None for ids, own in zip(rows, pictures, strict=True)
        ]
        for ids, shown in zip(rows, found, strict=True):
            if shown is not None and shown.axes is not None:
                shown.axes.check(len(ids) + new, self.config.context)
        return found

    def on_threads(self) -> AbstractContextManager[Any]:
        """Within the block the decoder computes on its threads: the kernels' own where they do all that takes long,
        else PyTorch's. Outside nothing has changed."""
        return own_threads(self.threads) if self._on_kernels else torch_threads(self.threads)

    @cached_property
    def _on_kernels(self) -> bool:
        return self.decoder.on_kernels

    def _checked(self, ids: list[int], *, new: int) -> list[int]:
        if not ids:
            raise WorkloadError("the prompt is empty", allowed="at least one token")
        config = self.config
        wrong = next((token for token in ids if not 0 <= token < config.vocabulary), None)
        if wrong is not None:
            raise WorkloadError(f"token id {wrong} is out of range", allowed=f"0 to {config.vocabulary - 1}")
        if len(ids) + new > config.context:
            raise WorkloadError(
                f"a prompt of {len(ids)} tokens and {new} new ones exceed the model's context",
                found=f"{len(ids) + new} tokens",
                allowed=f"{config.context} together",
                next="shorten the prompt"
                if len(ids) > config.context
                else "shorten it or ask for fewer tokens",
            )
        return ids


class LoadedDecoder(LoadedPagedModel[Decoder]):
    """A native decoder with its tokenizer."""

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config


def _chunks(
    rows: list[list[int]], size: int, end: Callable[[int, int, int], int] = lambda row, start, stop: stop
) -> Iterator[list[tuple[int, int, int]]]:
    """(row, start, stop) of forward calls of about `size` tokens that together cover all rows in order.

    A call has at most `size` tokens, unless `end` moves a stop further back.
    """
    chunk, room = [], size
    for row, ids in enumerate(rows):
        start = 0
        while start < len(ids):
            stop = end(row, start, min(len(ids), start + room))
            chunk.append((row, start, stop))
            room -= stop - start
            start = stop
            if room <= 0 or stop < len(ids):  # a call has one piece of a row
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


def seeds_of(seed: int | Sequence[int], rows: int) -> list[int]:
    """One seed for each row; from a single number, row r of a batch gets what no other row does."""
    if isinstance(seed, int):
        return [1_000_003 * seed + row for row in range(rows)]
    if len(seed) != rows:
        raise WorkloadError(
            f"{len(seed)} seeds for {rows} prompts", allowed="one number, or one for each prompt"
        )
    return list(seed)
