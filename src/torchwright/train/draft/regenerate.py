"""Data in which the answers are the target's own: what a served draft has to foresee.

Every part of a document that is trained on is written anew by the target, behind what stands before it; the rest stays.
A plain text keeps its first tokens. Documents go in parts of a file each, so that a stopped run goes on with the next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from torchwright.core.paths import file_digest
from torchwright.core.process.files import replacing
from torchwright.train.data.documents import Document, FileReport, write_documents
from torchwright.train.data.packing import document_starts
from torchwright.train.data.shards import DataError, Shards, read_checksums
from torchwright.train.data.streams import mixed
from torchwright.train.data.text import write_checksums
from torchwright.train.draft.config import Regenerate
from torchwright.train.draft.target import TargetModel

PART = 64
"""Documents that are written at once, and kept in one file."""
PLAN, EMPTY = "plan.json", "no answers"


def regenerated(
    shards: Shards,
    folder: Path,
    how: Regenerate,
    target: TargetModel,
    *,
    seed: int,
    end: int | None,
    told: Callable[[int, int], None],
) -> list[Path]:
    """Files of the shards' documents with the target's answers, in `folder`; `told(done, all)` follows each part.

    Parts that are there are taken as they are, if they were made of the same data in the same way. Raises `DataError`
    where the target has room for no answer.
    """
    places = [place for shard in range(len(shards.paths)) for place in _places(shards, shard, end, how)]
    folder.mkdir(parents=True, exist_ok=True)
    _settle(folder, {"data": shards.digest(), "seed": seed, **how.model_dump()})
    known = read_checksums(folder)
    kind = np.dtype(np.uint16 if shards.vocabulary <= 1 << 16 else np.uint32)
    files = list[Path]()
    for first in range(0, len(places), PART):
        path = folder / f"part-{first // PART:06}.safetensors"
        if not _kept(path, known.get(path.name)):
            part = places[first : first + PART]
            documents = [_document(shards, *place) for place in part]
            answered = answer(documents, how, target, [mixed(seed, first + n) for n in range(len(part))])
            known[path.name] = EMPTY
            if answered:
                with replacing(path) as new:
                    write_documents(new, kind, lambda report, answered=answered: _reported(report, answered))
                known[path.name] = file_digest(path)
            write_checksums(folder, known)
        if known[path.name] != EMPTY:
            files.append(path)
        told(min(first + PART, len(places)), len(places))
    if not files:
        raise DataError(
            "the target has room for no answer",
            found=f"{len(places):,} documents, whose prompts fill its {target.loaded.config.context:,} places",
            next="give shorter rows, or leave [regenerate] out",
        )
    return files


@dataclass(frozen=True)
class Span:
    """A run of tokens that are kept, and what follows it."""

    kept: list[int]
    answered: bool
    """True if the target writes on behind it."""
    last: int | None
    """The last token of the answer that stood there."""


def prompts(shards: Shards, end: int | None, *, tokens: int, most: int) -> list[list[int]]:
    """Return the beginnings of documents from all over the shards, up to the first token that is trained on.

    Of plain texts the first `tokens` are taken; longer prompts are cut at their beginning.
    """
    how = Regenerate(prompt_tokens=tokens, tokens=tokens)
    places = [place for shard in range(len(shards.paths)) for place in _places(shards, shard, end, how)]
    spread = places[:: max(1, len(places) // most)][:most]
    spans = [_spans(_document(shards, *place), tokens) for place in spread]
    return [kept for some in spans if some and (kept := some[0].kept[-tokens:])]


def answer(
    documents: list[Document], how: Regenerate, target: TargetModel, seeds: list[int]
) -> list[Document]:
    """The documents with every trained span written by the target, a span of all of them at a time.

    Documents without room for an answer are left out.
    """
    rest = [_spans(document, how.prompt_tokens) for document in documents]
    ids: list[list[int]] = [[] for _ in documents]
    trained: list[list[bool]] = [[] for _ in documents]
    while any(rest):
        asked = dict[int, Span]()
        for number, spans in enumerate(rest):
            if spans:
                span = spans.pop(0)
                ids[number] += span.kept
                trained[number] += [False] * len(span.kept)
                if span.answered and ids[number]:
                    asked[number] = span
        for number, new in _written(asked, ids, seeds, how, target).items():
            ids[number] += new
            trained[number] += [True] * len(new)
    return [
        Document(ids=np.array(own, np.int64), trained=np.array(which, bool))
        for own, which in zip(ids, trained, strict=True)
        if any(which)
    ]


def _written(
    asked: dict[int, Span], ids: list[list[int]], seeds: list[int], how: Regenerate, target: TargetModel
) -> dict[int, list[int]]:
    """Return the target's answers by document, each with the token that ends it; none where the context is full."""
    loaded, written = target.loaded, dict[int, list[int]]()
    room = {number: min(how.tokens, loaded.config.context - len(ids[number])) for number in asked}
    # A call has one limit for all of its prompts.
    for limit in sorted({count for count in room.values() if count > 0}):
        some = [number for number, count in room.items() if count == limit]
        answers = loaded.generate(
            [ids[number] for number in some],
            max_new_tokens=limit,
            seed=[seeds[number] for number in some],
            temperature=how.temperature,
        )
        for number, tokens in zip(some, answers, strict=True):
            # `generate` leaves the stop token out, and only an answer that has one ends before the limit.
            ended = len(tokens) < limit
            written[number] = [*tokens, _stop(loaded.stop, asked[number].last)] if ended else tokens
    return written


def _stop(stops: tuple[int, ...], last: int | None) -> int:
    """The token that ends an answer: the one that ended the answer before it, where that was such a token."""
    return last if last is not None and last in stops else stops[0]


def _spans(document: Document, prompt_tokens: int) -> list[Span]:
    """The runs of a document that are kept; what is trained on is dropped."""
    ids, trained = document.ids.tolist(), document.trained
    if trained[1:].all():  # a plain text
        return [Span(ids[:prompt_tokens], answered=True, last=None)]
    edges = [0, *(np.flatnonzero(np.diff(trained.astype(np.int8))) + 1).tolist(), len(ids)]
    runs = list(pairwise(edges))
    return [
        Span(ids[begin:stop], stop < len(ids), ids[after - 1] if stop < len(ids) else None)
        for (begin, stop), (_, after) in zip(runs, [*runs[1:], (0, 0)], strict=True)
        if not trained[begin]
    ]


def _document(shards: Shards, shard: int, start: int, stop: int) -> Document:
    trained = shards.trained(shard, start, stop - start).copy()
    trained[:1] = False
    return Document(ids=shards.read(shard, start, stop - start), trained=trained)


def _places(shards: Shards, shard: int, end: int | None, how: Regenerate) -> Iterator[tuple[int, int, int]]:
    """(shard, start, stop) of each document; a plain text is several, each as long as a prompt with its answer."""
    starts = document_starts(shards, shard, end).tolist()
    plain, piece = not shards.answers(shard), how.prompt_tokens + how.tokens
    for start, stop in zip(starts, [*starts[1:], shards.sizes[shard]], strict=True):
        for begin in range(start, stop, piece if plain else max(1, stop - start)):
            last = min(stop, begin + piece) if plain else stop
            if last - begin > 1:
                yield shard, begin, last


def _kept(path: Path, digest: str | None) -> bool:
    """Check whether a part is there as it was written."""
    return digest == EMPTY or (digest is not None and path.is_file() and file_digest(path) == digest)


def _reported(report: FileReport, documents: list[Document]) -> list[Document]:
    report.form = "completion"  # windows hold whole documents
    report.documents = report.rows = len(documents)
    report.tokens = sum(len(document.ids) for document in documents)
    report.trained = sum(int(document.trained.sum()) for document in documents)
    return documents


def _settle(folder: Path, plan: dict[str, object]) -> None:
    """Remove parts that were made of other data or in another way."""
    path = folder / PLAN
    text = json.dumps(plan, sort_keys=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        for old in folder.glob("*"):
            old.unlink()
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8")
