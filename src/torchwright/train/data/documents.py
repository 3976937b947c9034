"""From rows to documents of tokens: which of them are trained on, and what was read, skipped and refused on the way."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchwright.core.rows import read_rows
from torchwright.hub.chat_template import ChatTemplate
from torchwright.train.data.forms import covered, render
from torchwright.train.data.layouts import COLUMNS, ColumnLayout, Form, find_layout
from torchwright.train.data.messages import RowFault
from torchwright.train.data.shards import DataError, read_metadata
from torchwright.train.data.turns import Marked, Stops

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BROKEN_LISTED = 100
"""Broken rows of a file that are kept with their reasons; all are counted."""
VERSION = 3
"""The version of how rows become tokens: another one makes the shards again."""


@dataclass(frozen=True, kw_only=True)
class RowsAs:
    """The way in which rows are read."""

    form: Form | None = None
    """None: as the columns say."""
    columns: Mapping[str, str] = field(default_factory=lambda: COLUMNS)
    """Column of each part of a row, by our name of the part."""
    strict: bool = False
    """Stop at a broken row."""
    longest: int | None = None
    """Places that the documents of a row may take together; a row with more is broken."""
    labels: tuple[str, ...] = ()
    """The names of classes."""
    draw: int | None = None
    """The seed by which rows are drawn that may be held out; None draws none."""

    def digest(self) -> str:
        """Return a digest of the fields that decide the tokens."""
        decides = [VERSION, self.form, dict(self.columns)]
        if self.longest is not None:
            decides += [self.longest, *self.labels]
        if self.draw is not None:
            decides.append({"draw": self.draw})
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Document:
    """The tokens of one text."""

    ids: np.ndarray
    """int64."""
    trained: np.ndarray
    """bool: which of them are labels. The first never is one: nothing comes before it."""


@dataclass
class FileReport:
    """The report on a file's rows."""

    form: Form | None = None
    layout: str | None = None
    """The name of the layout that the rows were read as."""
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0
    """Tokens that are labels."""
    empty: int = 0
    """Rows whose text is empty: skipped."""
    broken: int = 0
    listed: list[tuple[int, str]] = field(default_factory=list)
    """(line or row, reason) of the first `BROKEN_LISTED` broken rows."""
    notes: dict[str, int] = field(default_factory=dict)
    """Remark on how labels were found → the documents that it holds for."""
    drawn: dict[str, Any] | None = None
    """Rows that may be held out: the number of `rows`, and the `documents` of each drawn one.

    They are the last of the shard, in this order."""

    def refuse(self, number: int, reason: str) -> None:
        self.broken += 1
        if len(self.listed) < BROKEN_LISTED:
            self.listed.append((number, reason[:300]))


class ChatEncoder:
    """A tokenizer and the model's chat template."""

    def __init__(
        self, tokenizer: Tokenizer, chat: ChatTemplate, end: int | None, ends: Sequence[int] = ()
    ) -> None:
        """`end` follows each text that no template ended; `ends` are the other tokens at which the model stops."""
        self.tokenizer, self.chat, self._end = tokenizer, chat, end
        added = tokenizer.get_added_tokens_decoder()
        special = [token.content for token in added.values() if token.special]
        self.ends = tuple(ends)
        stops = [tokenizer.id_to_token(token) for token in (end, *ends) if token is not None]
        self.stops = Stops(special, [text for text in stops if text])
        self.lead = _lead(tokenizer, chat.begin)
        """The tokens that inference puts before a text which no template wrote."""

    def digest(self) -> str:
        """Return a digest of what decides the tokens of rows, without the tokenizer."""
        return f"{self.chat.digest()} {self.lead} {self.ends}"

    def encode(self, texts: list[Marked]) -> list[Document]:
        """Return the tokens and labels of texts."""
        # A text that is read as a whole has the special tokens that it will have in use.
        special = any(text.closing is not None for text in texts)
        encoded = self.tokenizer.encode_batch([text.text for text in texts], add_special_tokens=special)
        return [self._document(text, *found) for text, found in zip(texts, map(_parts, encoded), strict=True)]

    def _document(self, text: Marked, ids: np.ndarray, offsets_N2: np.ndarray) -> Document:
        if text.closing is not None:
            closed = np.append(ids, text.closing)
            return Document(ids=closed, trained=np.arange(len(closed)) == max(1, len(ids)))
        trained = np.ones(len(ids), bool) if text.spans is None else covered(offsets_N2, text.spans)
        if text.ended and self._end is not None:
            ids, trained = np.append(ids, self._end), np.append(trained, True)
        if text.begun and ids[: len(self.lead)].tolist() != self.lead:
            ids = np.concatenate([np.array(self.lead, np.int64), ids])
            trained = np.concatenate([np.zeros(len(self.lead), bool), trained])
        trained[:1] = False
        return Document(ids=ids, trained=trained)


def _lead(tokenizer: Tokenizer, begin: str | None) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text, as `FolderTokenizer` does for inference."""
    encoded = tokenizer.encode("a", add_special_tokens=True)
    own = sum(1 for _ in itertools.takewhile(bool, encoded.special_tokens_mask))
    lead = encoded.ids[:own]
    first = None if begin is None else tokenizer.token_to_id(begin)
    return lead if first is None or lead[:1] == [first] else [first, *lead]


def _parts(encoding: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)


def read_documents(
    path: Path, encoder: ChatEncoder, how: RowsAs, report: FileReport, *, at_once: int = 64
) -> Iterator[tuple[int, list[Document]]]:
    """Yield (row, its documents: one, or a preference's two) of a file of rows; `report` counts what becomes of each.

    Raises `DataError` for a file that cannot be read, that holds nothing to train on, or, where `how` is strict, for
    its first broken row.
    """
    rendered = _rendered(path, encoder, how, report)
    while some := list(itertools.islice(rendered, at_once)):
        documents = iter(encoder.encode([text for _, texts in some for text in texts]))
        for number, texts in some:
            found = [next(documents) for _ in texts]
            if fault := _fault(found, how.longest):
                _refuse(path, number, fault, how, report)
                continue
            report.documents += len(found)
            report.tokens += sum(len(document.ids) for document in found)
            report.trained += sum(int(document.trained.sum()) for document in found)
            for text in texts:
                report.notes |= {note: report.notes.get(note, 0) + 1 for note in text.notes}
            yield number, found
    if not report.documents:
        reasons = "; ".join(f"{number}: {reason}" for number, reason in report.listed[:3])
        raise DataError(
            f"{path} holds no row to train on",
            found=f"{report.rows:,} rows, {report.empty:,} empty, {report.broken:,} broken"
            + (f" ({reasons})" if reasons else ""),
            next="`torchwright data check` lists them",
        )


def _fault(found: list[Document], longest: int | None) -> str | None:
    """Return the fault of a row's documents; None without a fault."""
    if not all(document.trained.any() for document in found):
        return "nothing of the row is trained on: it has no token to predict"
    places = sum(len(document.ids) - 1 for document in found)  # the last token is a label alone
    if longest is not None and places > longest:
        return f"it takes {places:,} places, and a window has {longest:,}"
    return None


def _rendered(
    path: Path, encoder: ChatEncoder, how: RowsAs, report: FileReport
) -> Iterator[tuple[int, list[Marked]]]:
    """Yield (row, its texts) of the rows that have texts."""
    layout: ColumnLayout | None = None
    for row in read_rows(path):
        report.rows += 1
        try:
            if row.fault:
                raise RowFault(row.fault)
            if layout is None:  # the first whole row says what all are
                layout = find_layout(row.values, how.columns, how.form, str(path))
                report.form, report.layout = layout.form, layout.name
            texts = render(layout, row.values, how.columns, encoder.chat, encoder.stops, how.labels)
        except RowFault as fault:
            _refuse(path, row.number, str(fault), how, report)
            continue
        if texts:
            yield row.number, texts
        else:
            report.empty += 1


def _refuse(path: Path, number: int, reason: str, how: RowsAs, report: FileReport) -> None:
    report.refuse(number, reason)
    check_broken(path, report, how)


def check_broken(path: Path, report: FileReport, how: RowsAs) -> None:
    """Raise `DataError` for the first broken row where `how` is strict."""
    if how.strict and report.broken:
        number, reason = report.listed[0]
        raise DataError(
            f"row {number} of {path} is broken",
            found=reason,
            next="mend it, or leave out strict: it is then counted, and left out",
        )


def write_documents(
    path: Path, kind: np.dtype, fill: Callable[[FileReport], Iterable[Document]]
) -> FileReport:
    """Write a shard of documents: tokens, whether each is trained on, and where documents begin.

    `fill` gives the documents, and keeps the report that is written with them. The header of a safetensors file comes
    first and says the lengths: the tensors are written to files of their own and copied behind it. `path` is written
    to directly.
    """
    report, begins, count = FileReport(), [], 0
    parts = [path.with_name(f"{path.name}.{name}") for name in ("tokens", "trained")]
    try:
        with parts[0].open("wb") as tokens, parts[1].open("wb") as trained:
            for document in fill(report):
                begins.append(count)
                tokens.write(document.ids.astype(kind).tobytes())
                trained.write(document.trained.astype(np.uint8).tobytes())
                count += len(document.ids)
        starts = np.array(begins, np.int64).tobytes()
        _join(path, kind, count, starts, parts, json.dumps(vars(report)))
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    return report


def _join(path: Path, kind: np.dtype, count: int, starts: bytes, parts: list[Path], report: str) -> None:
    sizes = {"starts": len(starts), "tokens": count * kind.itemsize, "trained": count}
    types = {"starts": "I64", "tokens": f"U{8 * kind.itemsize}", "trained": "U8"}
    header: dict[str, Any] = {"__metadata__": {"report": report}}
    place = 0
    for name, size in sizes.items():
        shape = [count if name != "starts" else len(starts) // 8]
        header[name] = {"dtype": types[name], "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + starts)
        for part in parts:
            with part.open("rb") as source:
                while piece := source.read(1 << 20):
                    file.write(piece)


def read_report(shard: Path) -> FileReport:
    """Return the report that was written with a shard of documents."""
    told = json.loads(read_metadata(shard)["report"])
    return FileReport(**{**told, "listed": [(number, reason) for number, reason in told["listed"]]})


def form_of(shard: Path) -> Form | None:
    """Return the form of the rows that a shard was made of; None where it does not say."""
    told = read_metadata(shard).get("report")
    return None if told is None else json.loads(told)["form"]
