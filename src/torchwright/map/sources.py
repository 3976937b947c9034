"""Inputs as streams of records: one source for each file or folder of files, never a whole file in memory.

A record is raw where that is possible: the line of JSON or text as it stands, which the worker parses. Rows of CSV,
Parquet and Arrow are parsed here, and only the columns that the task reads go on.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from torchwright.core import rows
from torchwright.core.errors import DataError
from torchwright.core.regular_file import is_url
from torchwright.core.rows import DataRow, dataset_files, is_dataset, parsed_line, read_rows, rows_suffix

Kind = Literal["json", "text", "path"]
Format = Literal["jsonl", "text"]
LINES, TEXTS = (".jsonl", ".ndjson"), (".txt", ".text")
PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".heif"})
SOUNDS = frozenset({".wav", ".flac", ".ogg", ".mp3", ".m4a", ".mp4", ".webm", ".opus", ".aac", ".mkv"})
FORMATS = (
    "JSONL, JSON, CSV, TSV and text (.txt), each also as .gz; Parquet; Arrow; "
    "folders of these, or of pictures or of sounds"
)
PEEKED = 1000
"""Rows without one that can be read, after which a file is not what its name says."""
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """One row on its way to a worker, or what is wrong with it."""

    line: int
    """Its line, or its place among rows or files, from 1."""
    raw: bytes = b""
    fault: str | None = None


Item = Record | DataRow


class Source:
    """One input: its records in order, and the bytes that have been read.

    `peek` looks at the first row before `records` gives it.
    """

    def __init__(
        self,
        label: str,
        kind: Kind,
        items: Callable[[Source], Iterator[Item]],
        size: int | None,
    ) -> None:
        self.label = label
        self.kind: Kind = kind
        self.size = size
        """Bytes; None where nobody knows."""
        self.read = 0
        """Bytes that were read, of `size`."""
        self.columns: tuple[str, ...] | None = None
        """Columns of parsed rows that go on; all without it."""
        self._items = self._guarded(items(self))
        self._held: list[Item] = []
        self._first: dict[str, Any] | None = None

    def peek(self) -> dict[str, Any] | None:
        """Return the first row that can be read, None where the first `PEEKED` cannot.

        Raises `DataError` as `records` does.
        """
        while self._first is None and len(self._held) < PEEKED:
            item = next(self._items, None)
            if item is None:
                break
            self._held.append(item)
            row = parse(item, self.kind) if isinstance(item, Record) else item
            if row.fault is None:
                self._first = row.values
        return self._first

    def records(self) -> Iterator[Record]:
        """Yield the records. Raises `DataError` for an input that cannot be read to its end."""
        held, self._held = self._held, []
        for items in (held, self._items):
            for item in items:
                yield item if isinstance(item, Record) else self._encoded(item)
        self.read = self.size or 0

    def _guarded(self, items: Iterator[Item]) -> Iterator[Item]:
        try:
            yield from items
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{self.label} cannot be read to its end", found=str(error), next="make or fetch it again"
            ) from error

    def _encoded(self, row: DataRow) -> Record:
        if row.fault is not None:
            return Record(row.number, fault=row.fault)
        wanted = self.columns
        values = row.values if wanted is None else {name: row.values.get(name) for name in wanted}
        return Record(row.number, json.dumps(values, ensure_ascii=False, default=_plain).encode())


def parse(record: Record, kind: Kind) -> DataRow:
    """Return the row of a raw record; what is wrong with it is said in the row."""
    if record.fault is not None:
        return DataRow(number=record.line, fault=record.fault)
    if kind == "json":
        return parsed_line(record.line, record.raw)
    try:
        text = record.raw.decode()
    except UnicodeDecodeError as error:
        return DataRow(number=record.line, fault=f"no UTF-8: {error.reason} at byte {error.start:,}")
    if kind == "text":
        return DataRow(number=record.line, values={"text": text})
    return DataRow(number=record.line, values={"file": text.rpartition("\n")[2]})


def open_sources(inputs: Sequence[str], form: Format | None, media: frozenset[str]) -> list[Source]:
    """Return the sources of files and folders, in the order of the words; a folder's files in the order of their names.

    `form` is for names that do not tell; `media` are the suffixes of files that the task reads as they are. Raises
    `DataError` for what is not there, and for a file that nobody can read.
    """
    found = list[Source]()
    for word in inputs:
        if word == "-":
            found.append(_standard_input(form))
            continue
        if is_url(word):
            raise DataError(f"{word} is a URL, and nothing is downloaded", next="give the name of a file")
        path = Path(word)
        if not path.exists():
            raise DataError(f"there is no file {word}", allowed=FORMATS)
        found += _of_folder(path, form, media) if path.is_dir() else [_of_file(path, form, media)]
    return found


def _of_folder(path: Path, form: Format | None, media: frozenset[str]) -> list[Source]:
    if is_dataset(path):
        size = sum(file.stat().st_size for file in dataset_files(path))
        return [Source(str(path), "json", lambda source: _parsed_rows(path, source), size)]
    files = sorted(
        Path(folder, name)
        for folder, below, names in os.walk(path)
        for name in names
        if not name.startswith(".")
        and not any(part.startswith(".") for part in Path(folder).relative_to(path).parts)
    )
    listed = [file for file in files if file.suffix.lower() in media]
    if listed:
        size = sum(file.stat().st_size for file in listed)
        return [Source(str(path), "path", lambda source: _paths(listed, source), size)]
    readable = [file for file in files if _readable(file)]
    if not readable:
        suffixes = ", ".join(sorted({file.suffix or file.name for file in files})[:10])
        raise DataError(
            f"{path} holds no file that is read",
            found=suffixes or "no files",
            allowed=", ".join(sorted(media)) or FORMATS,
        )
    return [_of_file(file, form, media) for file in readable]


def _readable(path: Path) -> bool:
    return rows_suffix(path) in (*rows.READERS, *TEXTS)


def _of_file(path: Path, form: Format | None, media: frozenset[str]) -> Source:
    suffix, size = rows_suffix(path), path.stat().st_size
    if path.suffix.lower() in media:
        return Source(str(path), "path", lambda source: _paths([path], source), size)
    if not path.is_file():
        raise DataError(f"{path} is not a regular file", next="read a pipe as standard input: -")
    if suffix in LINES or form == "jsonl":
        return Source(str(path), "json", lambda source: _file_lines(path, source), size)
    if suffix in TEXTS or form == "text":
        return Source(str(path), "text", lambda source: _file_lines(path, source), size)
    if suffix not in rows.READERS:
        raise DataError(
            f"{path}: the name does not say what it holds",
            allowed=FORMATS,
            next="say --input-format jsonl or text",
        )
    return Source(str(path), "json", lambda source: _parsed_rows(path, source), size)


def _standard_input(form: Format | None) -> Source:
    """Read standard input as JSONL if it begins with a brace, else as text."""
    file = cast("io.BufferedReader", sys.stdin.buffer)
    if form is None:
        head = file.peek(1 << 12)
        form = "jsonl" if head.removeprefix(BOM).lstrip().startswith(b"{") else "text"
    kind: Kind = "json" if form == "jsonl" else "text"
    return Source("-", kind, lambda source: _lines(file), None)


def _file_lines(path: Path, source: Source) -> Iterator[Record]:
    with rows.opened(path) as file:
        for record in _lines(file):
            source.read = os.lseek(file.fileno(), 0, os.SEEK_CUR)  # of a compressed file the compressed bytes
            yield record


def _lines(file: gzip.GzipFile | io.BufferedReader[Any]) -> Iterator[Record]:
    """Yield the lines that are not blank, without the bytes that end them."""
    number = 0
    while line := file.readline(rows.LONGEST_LINE + 1):
        number += 1
        if len(line) > rows.LONGEST_LINE and not line.endswith(b"\n"):
            rows.pass_over(file)
            yield Record(number, fault=f"the line has more than {rows.LONGEST_LINE:,} bytes")
            continue
        line = line.rstrip(b"\r\n")
        if number == 1:
            line = line.removeprefix(BOM)
        if line.strip():
            yield Record(number, line)


def _parsed_rows(path: Path, source: Source) -> Iterator[DataRow]:
    """Yield rows of a table. The share that was read is an estimate: no reader says where it is."""
    total = _row_count(path)
    for number, row in enumerate(read_rows(path), 1):
        if total and source.size:
            source.read = source.size * number // total
        elif source.size:
            letters = sum(len(value) + 1 for value in row.values.values() if isinstance(value, str))
            source.read = min(source.size, source.read + letters)
        yield row


def _row_count(path: Path) -> int | None:
    """Return the rows of a Parquet file, which its footer says."""
    if rows_suffix(path) != ".parquet":
        return None
    try:
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(path).num_rows
    except (ImportError, OSError, ValueError):  # `read_rows` says what is wrong
        return None


def _paths(files: Sequence[Path], source: Source) -> Iterator[Record]:
    """Yield a record for each file: its size and time of change, which stand for its content, and its path."""
    for number, file in enumerate(files, 1):
        status = file.stat()
        source.read += status.st_size
        yield Record(number, f"{status.st_size} {status.st_mtime_ns}\n{file}".encode())


def _plain(value: Any) -> str:
    """Return a date, a decimal or a number of NumPy's as text; bytes are not."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise DataError(
            "a column of bytes cannot go on to the output", next="name the columns that are wanted: --keep"
        )
    return str(value)
