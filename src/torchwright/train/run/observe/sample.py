"""One window of a run's data as the model sees it: its documents, its tokens, and which of them are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchwright.hub.tokenizer import find_tokenizer
from torchwright.train.data.batch import WindowBatch
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.run.config.run import Run
from torchwright.train.run.observe.survey import source_beside
from torchwright.train.run.runtime.corpus import open_data, walk_of
from torchwright.train.run.runtime.processes import processes

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Neighbouring tokens of one document, all of them trained on or none."""

    document: int
    """From 0 in the window."""
    position: int
    """Position of its first token in its document."""
    trained: bool
    ids: list[int]
    text: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A window."""

    window: int
    where: str
    """The files and places that it comes from."""
    tokens: int
    """Places in it that hold a token of a document."""
    labels: int
    segments: list[Segment]


def sample(run: Run, folder: Path, number: int) -> Sample:
    """Window `number` of the run's training data. Tokens are kept in the run's folder, as training would."""
    with processes(run.timeout_s), source_beside(run, folder) as (source, config):
        corpus = open_data(run, config, folder, source, folder / run.out)
        walk = walk_of(run, corpus, run.context, config.bos, 0)
        tokenizer = find_tokenizer(source)
        pieces = split(walk.batch(number, 1))
        return Sample(
            window=number,
            where=walk.describe(number, 1),
            # The last token of a document is a label alone.
            tokens=sum(len(ids) for _, _, _, ids in pieces) - len({document for document, *_ in pieces}),
            labels=sum(len(ids) for _, _, trained, ids in pieces if trained),
            segments=[
                Segment(
                    document=document,
                    position=position,
                    trained=trained,
                    ids=ids,
                    text=_message(run, tokenizer, ids, trained),
                )
                for document, position, trained, ids in pieces
            ],
        )


def _message(run: Run, tokenizer: Tokenizer | None, ids: list[int], trained: bool) -> str:
    """Return the text of tokens; a head's label has no text."""
    if run.head is not None and trained:
        return run.head.labels[ids[0]] if run.head.labels else ""
    return "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)


def split(batch: WindowBatch) -> list[tuple[int, int, bool, list[int]]]:
    """Return (document, position, trained, ids) of the segments of a batch's first row, without padding."""
    ids, labels = batch.ids_BT[0].tolist(), batch.labels_BT[0].tolist()
    begins = [0] * len(ids) if batch.documents_BT is None else batch.documents_BT[0].tolist()
    found: list[tuple[int, int, bool, list[int]]] = []
    for document, begin in enumerate(sorted({*begins})):
        here = [place for place, start in enumerate(begins) if start == begin]
        if all(labels[place] == IGNORE for place in here):
            continue
        # A token is trained on where the place before it has a label.
        told = [(ids[begin], False), *((labels[at], True) for at in here)]
        for position, (token, trained) in enumerate(told):
            if token == IGNORE:
                token, trained = ids[begin + position] if begin + position <= here[-1] else IGNORE, False
            if token == IGNORE:
                continue
            if found and found[-1][0] == document and found[-1][2] == trained:
                found[-1][3].append(token)
            else:
                found.append((document, position, trained, [token]))
    return found
