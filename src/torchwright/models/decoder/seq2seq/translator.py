"""A text model of an encoder and a decoder: source texts in, answers out.

The encoder reads each source once. Every layer of the decoder keeps the source's keys and values in pages
(`memory.py`), and the answer's own in a paged cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.core.errors import WorkloadError
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.cpu.threads import own_threads, torch_threads
from torchwright.models.decoder.cache import PAGE, CacheSequence, PagedCache
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.generation.generate import seeds_of
from torchwright.models.decoder.generation.sampling import Sampler, Sampling
from torchwright.models.decoder.memory import Memory
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.post_norm import embedding_norm
from torchwright.models.decoder.scores import Logits
from torchwright.models.decoder.seq2seq.encoder import Encoder
from torchwright.models.decoder.seq2seq.rules import GenerationRules
from torchwright.models.decoder.seq2seq.source import SourceTokenizer
from torchwright.models.decoder.weights import DecoderParts
from torchwright.workloads.generation import as_list

MOST_ENCODED = 2048
"""Tokens of sources that the encoder reads at once, where they are of several."""


class EmbeddingParts(DecoderParts, Protocol):
    """The parts that an `Embedding` is built from."""

    config: DecoderConfig


class Embedding(nn.Module):
    """From token ids (T,) and their positions to what an encoder reads (T, E)."""

    table: torch.Tensor
    positions: torch.Tensor | None

    def __init__(self, parts: EmbeddingParts) -> None:
        super().__init__()
        self.register_buffer("table", parts.embedding())
        self.scale = parts.config.embedding_scale
        self.register_buffer("positions", parts.positions())
        self.norm = embedding_norm(parts.config, parts)

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        stream_TE = F.embedding(ids_T, self.table) * self.scale
        if self.positions is not None:
            stream_TE = stream_TE + F.embedding(positions_T, self.positions)
        return stream_TE if self.norm is None else self.norm(stream_TE)


class LoadedSeq2Seq:
    """An encoder and a decoder with their tokenizer.

    model.logits([5, 6, 1], [0, 7, 8])                        float32 (T, V) of a target after a source
    model.generate("A text to be translated", max_new_tokens=64)
    model.generate([[5, 6, 1], [7, 1]], temperature=0.8)      as lists of token ids
    """

    sampling = frozenset(field.name for field in fields(Sampling))

    def __init__(
        self,
        embedding: Embedding,
        encoder: Encoder,
        decoder: Decoder,
        folder: Path,
        *,
        kv_dtype: torch.dtype,
        rules: GenerationRules,
        source_language: str | None = None,
    ) -> None:
        self.embedding, self.encoder, self.decoder = embedding, encoder, decoder
        self.folder, self.kv_dtype, self.rules, self.source_language = (
            folder,
            kv_dtype,
            rules,
            source_language,
        )
        self.device = torch.device("cpu")

    @cached_property
    def text(self) -> SourceTokenizer:
        """The tokenizer, read when text is first used."""
        return SourceTokenizer(self.folder)

    def encode(self, text: str) -> list[int]:
        """Token ids of a source text."""
        return self.text.encode(text, self.source_language)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer's token ids."""
        return self.text.decode(ids)

    def room(self, tokens: int) -> int:
        """Return the number of new tokens that fit; the source does not count."""
        return self.decoder.config.context

    @torch.inference_mode()
    def logits(self, source: Sequence[int], target: Sequence[int]) -> torch.Tensor:
        """Logits (T, V) in float32 of what follows each token of a target, which begins with the start token.

        Raises `WorkloadError` for ids out of range, and for texts that are empty or longer than the model takes.
        """
        self._check(source, self.encoder, 0)
        self._check(target, self.decoder, 0)
        memory, (remembered,) = self._remember([list(source)])
        cache = self._cache([len(target)])
        batch = cache.append([(cache.sequence(0), list(target))])
        with self.on_threads():
            hidden_TE = self.decoder(replace(batch, memory=memory.of([remembered])), cache)
            return self.decoder.logits(hidden_TE)

    def follow(self, sources: list[list[int]], targets: list[list[int]]) -> torch.Tensor:
        """Logits (B, N, V) in float32 after each token of targets of one length, read as if they were written.

        Raises `WorkloadError` as `logits` does.
        """
        for ids, target in zip(sources, targets, strict=True):
            self._check(ids, self.encoder, 0)
            self._check(target, self.decoder, 0)
        with torch.inference_mode():
            memory, remembered = self._remember(sources)
        cache = self._cache([len(target) for target in targets])
        sequences = [cache.sequence(0) for _ in sources]
        steps = [
            self.advance(cache, memory, list(zip(sequences, tokens, remembered, strict=True))).values_NV
            for tokens in zip(*targets, strict=True)
        ]
        return torch.stack(steps, 1).float()

    def generate(
        self,
        sources: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 64,
        seed: int | Sequence[int] = 0,
        stop: Sequence[int] | None = None,
        **sampling: Any,
    ) -> Any:
        """Answer each source, a text or token ids, until an end-of-text token or `max_new_tokens`.

        Returns texts for texts, lists of ids for ids, and one of them for one source, without start and stop tokens.
        `sampling` takes the fields of `Sampling`; the default is greedy. `stop` replaces the model's end-of-text ids;
        an empty list never stops. An answer does not depend on the other sources where the model is packed.

        Raises `WorkloadError` for an empty source, ids out of range, or a source longer than the model takes. Raises
        `UnknownName` for an option that does not exist.
        """
        items, single = as_list(sources)
        texts = isinstance(items[0], str)
        rows = [self.encode(item) if texts else item for item in items]
        outputs: list[list[int]] = [[] for _ in rows]
        for row, token in self.tokens(rows, max_new_tokens, seed, stop, Sampling.of(sampling)):
            outputs[row].append(token)
        results = [self.decode(ids) for ids in outputs] if texts else outputs
        return results[0] if single else results

    def write(
        self, ids: list[int], limit: int, *, seed: int, on_token: Callable[[int], None], **sampling: Any
    ) -> None:
        """See `Writer.write` (`workloads/generation.py`); the errors are `generate`'s."""
        for _, token in self.tokens([ids], limit, seed, None, Sampling.of(sampling)):
            on_token(token)

    def tokens(
        self,
        sources: list[list[int]],
        max_new_tokens: int,
        seed: int | Sequence[int],
        stop: Sequence[int] | None,
        sampling: Sampling,
    ) -> Iterator[tuple[int, int]]:
        """(row, token) as tokens appear, for token ids; the errors are `generate`'s."""
        if max_new_tokens < 0:
            raise WorkloadError(f"max_new_tokens {max_new_tokens}", allowed="0 or more")
        for ids in sources:
            self.check_source(ids)
        self._check([self.rules.start], self.decoder, max_new_tokens - 1)
        samplers = [Sampler(sampling, [], row_seed) for row_seed in seeds_of(seed, len(sources))]
        return self._steps(
            sources, samplers, max_new_tokens, self.rules.stop if stop is None else frozenset(stop)
        )

    def _steps(
        self, sources: list[list[int]], samplers: list[Sampler], limit: int, ends: frozenset[int]
    ) -> Iterator[tuple[int, int]]:
        if not limit:
            return
        with torch.inference_mode():
            memory, remembered = self._remember(sources)
        cache, rules = self._cache([limit] * len(sources)), self.rules
        sequences, last = [cache.sequence(0) for _ in sources], [rules.start] * len(sources)
        alive = list(range(len(sources)))
        for step in range(limit):
            logits = self.advance(cache, memory, [(sequences[i], last[i], remembered[i]) for i in alive])
            forced = rules.forced(step, limit)
            for place, row in enumerate(list(alive)):
                token = self._choose(samplers[row], logits, place) if forced is None else forced
                if token in ends:
                    alive.remove(row)
                    cache.free(sequences[row])
                    memory.free(remembered[row])
                    continue
                last[row] = token
                yield row, token
            if not alive:
                return

    def _choose(self, sampler: Sampler, logits: Logits, place: int) -> int:
        values_V, peaks_P = logits.row(place)
        return sampler(self.rules.allowed(values_V), None if self.rules.banned else peaks_P)

    @torch.inference_mode()
    def advance(
        self, cache: PagedCache, memory: Memory, rows: list[tuple[CacheSequence, int, CacheSequence]]
    ) -> Logits:
        """Logits after one more token of each: what was written so far, the token, and what is remembered."""
        batch = cache.append([(sequence, [token]) for sequence, token, _ in rows])
        batch = replace(batch, memory=memory.of([remembered for *_, remembered in rows]))
        with self.on_threads():
            return self.decoder.answer(batch, cache, batch.last_rows_B)

    def _remember(self, sources: list[list[int]]) -> tuple[Memory, list[CacheSequence]]:
        """Return the memory and the sequences that the decoder reads for each source."""
        pages = sum(-(-len(ids) // PAGE) for ids in sources)
        memory = Memory(self.decoder, pages=pages, dtype=self.kv_dtype)
        return memory, self.remember(memory, sources)

    def remember(self, memory: Memory, sources: list[list[int]]) -> list[CacheSequence]:
        """Read sources, and keep what the decoder reads of each; raises `CacheFull` where no page is free."""
        found = list[CacheSequence]()
        with self.on_threads():
            for group in _groups(sources):
                lengths = [len(ids) for ids in group]
                ids_T = torch.tensor([token for ids in group for token in ids])
                positions_T = torch.cat([torch.arange(length) for length in lengths])
                states_TE = self.encoder(self.embedding(ids_T, positions_T), lengths)
                found += [memory.write(part) for part in states_TE.split(lengths)]
        return found

    def _cache(self, tokens: Sequence[int]) -> PagedCache:
        pages = sum(-(-count // PAGE) for count in tokens)
        return PagedCache(self.decoder.config, pages=pages, dtype=self.kv_dtype)

    def on_threads(self) -> AbstractContextManager[Any]:
        """Within the block it computes on the kernels' own threads, where they do all that takes long."""
        return own_threads() if self._on_kernels else torch_threads(None)

    @cached_property
    def _on_kernels(self) -> bool:
        parts = (*self.encoder.modules(), *self.decoder.modules())
        linear = any(isinstance(part, nn.Linear) for part in parts)
        return not linear and ops.on(self.device, self.decoder.embedding.dtype) is ops.native

    def check_source(self, ids: Sequence[int]) -> None:
        """Raises `WorkloadError` for ids that are out of range, none, or more than the encoder takes."""
        self._check(ids, self.encoder, 0)

    def _check(self, ids: Sequence[int], stack: Encoder | Decoder, new: int) -> None:
        config = stack.config
        if not ids:
            raise WorkloadError("the text is empty", allowed="at least one token")
        wrong = next((token for token in ids if not 0 <= token < config.vocabulary), None)
        if wrong is not None:
            raise WorkloadError(f"token id {wrong} is out of range", allowed=f"0 to {config.vocabulary - 1}")
        if len(ids) + new > config.context:
            raise WorkloadError(
                f"{len(ids) + new} tokens are more than the model's {'decoder' if config.causal else 'encoder'} takes",
                allowed=str(config.context),
                next="ask for fewer tokens" if config.causal else "shorten the text",
            )


def _groups(sources: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Neighbours of at most `MOST_ENCODED` tokens together; one that has more is alone."""
    group, tokens = list[list[int]](), 0
    for ids in sources:
        if group and tokens + len(ids) > MOST_ENCODED:
            yield group
            group, tokens = [], 0
        group.append(ids)
        tokens += len(ids)
    yield group
