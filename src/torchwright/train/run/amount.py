"""Token counts of a run's data, taken after tokenization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchwright.train.data.packing import Packed, document_starts
from torchwright.train.data.shards import Shards
from torchwright.train.model.foreign import read_model_config
from torchwright.train.run.config.read import parse_run
from torchwright.train.run.runtime.corpus import PAIRED, Corpus, make_shards, open_shards


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Training data, counted while its shards exist."""

    tokens: int
    packed: bool
    """True if windows hold whole documents."""
    pairs: bool
    documents: int
    longest: int
    """Places of the longest document: one less than its tokens."""
    held: str | None
    """Description of the held-out data; None without any."""
    _shards: Shards
    _end: int | None

    def windows(self, context: int) -> int:
        """Return how many windows an epoch has."""
        if not self.packed:
            return max(1, self.tokens // context)
        return Packed(self._shards, context, 0, end=self._end, pairs=self.pairs).count


def measure(values: dict[str, Any], context: int, cache: Path) -> Amount:
    """Tokenize the data of a run file's values into `cache` and count them; `context` is the longest window of a pair.

    Raises `DataError` and `RunError`.
    """
    sizes = {"tokens": context, "batch_tokens": context, "context": context}
    run = parse_run({**values, **sizes}, "the run that these words make")
    folder = Path(run.model.tokenizer or run.model.folder or "")
    config = read_model_config(Path(run.model.folder or ""))
    corpus = open_shards(run, config, make_shards(run, config, Path(), folder, cache))
    return _amount(corpus, pairs=run.needs in PAIRED)


def _amount(corpus: Corpus, *, pairs: bool) -> Amount:
    (shards,) = corpus.train.values()
    starts = [document_starts(shards, shard, corpus.end) for shard in range(len(shards.paths))]
    sizes = zip(starts, shards.sizes, strict=True)
    lengths = np.concatenate([np.diff(begins, append=size) for begins, size in sizes])
    held = corpus.validation
    return Amount(
        tokens=shards.tokens,
        packed=corpus.packed,
        pairs=pairs,
        documents=len(lengths),
        longest=max(1, int(lengths.max(initial=1)) - 1),
        held=None if held is None else f"{held.tokens:,} tokens are held out for validation",
        _shards=shards,
        _end=corpus.end,
    )
