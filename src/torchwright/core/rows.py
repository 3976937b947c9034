"""Read rows from JSON lines, JSON lists, CSV, Parquet, Arrow, and folders that `datasets` saved.

Each file is read front to back, a piece at a time. What is not a row is reported by its number and left to the caller.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from torchwright.core.errors import DataError

LONGEST_LINE = 1 << 26
"""Bytes of one JSON line; the rest of a longer one is passed over unread."""
ROWS_AT_ONCE = 256
STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files that `datasets` writes into the folder of a data set, and of a data set of several splits."""
INSTALL = "pip install 'torchwright[data]'"
COMPRESSED = ".gz"
SEPARATORS = {".csv": ",;\t", ".tsv": "\t"}
"""Separators of a table's fields; of several the first that stands in its first line: Excel writes `;` in Europe."""
LEGACY = "; an older encoding? `iconv -f WINDOWS-1252 -t UTF-8`, or save it as CSV UTF-8"
"""The hint for a byte that UTF-8 does not have; the bytes do not tell which of the older encodings it is."""
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
PIECE = 1 << 20
"""Characters of a JSON list that are read at a time."""
BETWEEN = re.compile(r"[\s,]*")
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape that may be half of a surrogate pair."""
HOLDERS = ("data", "rows", "train", "examples", "instances")
"""Names under which one object holds the list of rows."""


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """One row of a file, or what is wrong with it."""

    number: int
    """Its line, or its place among rows, from 1."""
    values: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None


def read_rows(path: Path) -> Iterator[DataRow]:
    """The rows of a file or folder. Raises `DataError` for one that cannot be read at all, or not without pyarrow."""
    try:
        yield from _reader(path)(path)
    except (OSError, ValueError, EOFError, zlib.error) as error:  # pyarrow's are children of the first two
        raise DataError(f"{path} cannot be read", found=str(error), next="make or fetch it again") from error


def is_rows(path: Path) -> bool:
    """Check whether a file or folder holds rows, by its name or its content."""
    return rows_suffix(path) in READERS or is_dataset(path)


def rows_suffix(path: Path) -> str:
    """Return the end of a file's name that says how its rows are read, without that of gzip."""
    name = path.name.lower()
    return Path(name.removesuffix(COMPRESSED)).suffix


def is_dataset(path: Path) -> bool:
    """Check whether `datasets` saved a folder."""
    return path.is_dir() and ((path / STATE).is_file() or (path / SPLITS).is_file())


def dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `datasets` saved, in their order; they lie in it, whatever it says."""
    if (folder / SPLITS).is_file():
        splits = ", ".join(sorted(path.parent.name for path in folder.glob(f"*/{STATE}")))
        raise DataError(
            f"{folder} holds several splits of a data set",
            found=splits or "none that is whole",
            next=f"name one of them: {folder.name}/SPLIT",
        )
    try:
        listed = json.loads((folder / STATE).read_text("utf-8"))["_data_files"]
        names = [str(entry["filename"]) for entry in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / STATE} does not name the data set's files", found=repr(error)) from error
    outside = next((name for name in names if Path(name).name != name or name in ("", "..")), None)
    if outside is not None:
        raise DataError(f"{folder / STATE} names a file outside of its folder", found=outside)
    return [folder / name for name in names]


def _reader(path: Path) -> Callable[[Path], Iterator[DataRow]]:
    return _read_dataset if path.is_dir() else READERS[rows_suffix(path)]


class _Utf16(io.RawIOBase):
    """The bytes of a UTF-16 file as UTF-8, a piece at a time. Half of a character stays one, which no row may hold."""

    def __init__(self, file: gzip.GzipFile | io.BufferedReader) -> None:
        self._file, self._left = file, b""
        self._decoder = codecs.getincrementaldecoder("utf-16")(errors="surrogatepass")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            piece = self._file.read(len(buffer))
            self._left = self._decoder.decode(piece, final=not piece).encode("utf-8", "surrogatepass")
            if not piece:
                break
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        super().close()


def opened(path: Path) -> gzip.GzipFile | io.BufferedReader[Any]:
    """Open a file of text as UTF-8; Excel and PowerShell write UTF-16, with a mark that nothing else begins with."""
    with contextlib.ExitStack() as held:
        compressed = path.name.lower().endswith(COMPRESSED)
        file = held.enter_context(gzip.GzipFile(path) if compressed else path.open("rb"))
        found = io.BufferedReader(_Utf16(file)) if file.peek(2)[:2] in UTF_16 else file
        held.pop_all()
    return found


def _text(path: Path) -> TextIO:
    """Open a text; bytes that are not UTF-8 become lone surrogates, which `_damaged` finds."""
    return io.TextIOWrapper(opened(path), "utf-8-sig", errors="surrogateescape", newline="")


def _read_lines(path: Path) -> Iterator[DataRow]:
    with opened(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                pass_over(file)
                yield DataRow(number=number, fault=f"the line has more than {LONGEST_LINE:,} bytes")
            elif line.strip():
                yield parsed_line(number, line)


def pass_over(file: gzip.GzipFile | io.BufferedReader[Any]) -> None:
    """Read the rest of a line, of which little is in memory at a time."""
    while (piece := file.readline(1 << 20)) and not piece.endswith(b"\n"):
        pass


def parsed_line(number: int, line: bytes) -> DataRow:
    """Return the row of a line of JSON."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        values = json.loads(text)
    except UnicodeDecodeError as error:
        return DataRow(number=number, fault=f"no UTF-8: {error.reason} at byte {error.start:,}{LEGACY}")
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        return DataRow(number=number, fault=f"no JSON: {reason} at character {error.pos + 1:,}")
    except (RecursionError, ValueError) as error:  # a number of too many digits
        return DataRow(number=number, fault=f"JSON that cannot be read: {error}")
    return _row(number, values, text)


def _row(number: int, values: Any, text: str) -> DataRow:
    """Return the row of a JSON value that was written as `text`."""
    if not isinstance(values, dict):
        return DataRow(number=number, fault=f"no object, but {type(values).__name__}")
    fault = _damaged(text)
    if fault is None and HALF_CHARACTER.search(text):
        fault = _damaged(json.dumps(values, ensure_ascii=False))
    return DataRow(number=number, fault=fault) if fault else DataRow(number=number, values=values)


def _damaged(text: str) -> str | None:
    """Return why a text cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        if 0xDC80 <= half <= 0xDCFF:  # what `surrogateescape` made of a byte
            return f"no UTF-8: byte {half - 0xDC00:#x} at character {error.start + 1:,}{LEGACY}"
        return f"half of a character: the lone surrogate U+{half:04X}, as in a text that was cut"
    return None


def _read_json(path: Path) -> Iterator[DataRow]:
    """Rows of a list of objects, of lines, or of an object that holds the list."""
    with _text(path) as file:
        head = file.read(PIECE).lstrip()
    if head.startswith("["):
        with _text(path) as file:
            yield from _read_list(file)
        return
    first, _, rest = head.partition("\n")
    try:
        values = json.loads(first)
    except (ValueError, RecursionError):  # an object over several lines, or a line without end
        with _text(path) as file:
            values, rest = json.load(file), ""
        if _holder(values) is None:
            yield _row(1, values, json.dumps(values, ensure_ascii=False))
            return
    if _holder(values) is None or rest.strip():
        yield from _read_lines(path)
        return
    for number, row in enumerate(values[_holder(values)], 1):
        yield _row(number, row, json.dumps(row, ensure_ascii=False))


def _read_list(file: TextIO) -> Iterator[DataRow]:
    """Rows of a list of objects, of which a piece is in memory at a time."""
    decoder, buffer, place, number = json.JSONDecoder(), file.read(PIECE), 0, 0
    place = buffer.index("[") + 1
    while True:
        between = BETWEEN.match(buffer, place)
        place = between.end() if between else place
        try:
            if buffer.startswith("]", place):
                return
            values, end = decoder.raw_decode(buffer, place)
        except (ValueError, RecursionError) as error:
            # As much again, so that an object of any length is scanned a few times only.
            more = file.read(max(PIECE, len(buffer) - place)) if len(buffer) - place < LONGEST_LINE else ""
            if not more:
                yield DataRow(
                    number=number + 1, fault=f"no JSON from here on, nothing of it is read: {error}"[:300]
                )
                return
            buffer, place = buffer[place:] + more, 0
            continue
        number += 1
        yield _row(number, values, buffer[place:end])
        place = end


def _holder(values: Any) -> str | None:
    """Return the name under which an object holds a list of rows."""
    if not isinstance(values, dict):
        return None
    for name in HOLDERS:
        rows = values.get(name)
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            return name
    return None


def _read_csv(path: Path) -> Iterator[DataRow]:
    """Rows of a table whose first row names its columns; quoted fields may run over lines."""
    csv.field_size_limit(LONGEST_LINE)  # the library's own limit is shorter than many documents
    with _text(path) as file:
        lines = iter(lambda: file.readline(LONGEST_LINE), "")
        separators, first = SEPARATORS[rows_suffix(path)], next(lines, "")
        separator = next((one for one in separators if one in first), separators[0])
        reader = csv.reader(itertools.chain([first], lines), delimiter=separator, strict=True)
        names = _column_names(path, reader)
        while True:
            try:
                fields = next(reader, None)
            except csv.Error as error:
                yield DataRow(number=reader.line_num, fault=f"no CSV: {error}")
                continue
            if fields is None:
                return
            if not fields:  # a blank line
                continue
            fault = _damaged("".join(fields))
            if len(fields) != len(names):
                fault = f"{len(fields)} fields in place of {len(names)}"
            if fault:
                yield DataRow(number=reader.line_num, fault=fault)
            else:
                yield DataRow(number=reader.line_num, values=dict(zip(names, fields, strict=True)))


def _column_names(path: Path, reader: Iterator[list[str]]) -> list[str]:
    """Return a table's first row. Raises `DataError` if it is damaged: no other row could be read by it."""
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise DataError(
            f"the first row of {path} does not name its columns", found=f"no CSV: {error}"
        ) from error
    if fault := _damaged("".join(names)):
        raise DataError(f"the first row of {path} does not name its columns", found=fault)
    return names


def _read_parquet(path: Path) -> Iterator[DataRow]:
    parquet = _arrow("parquet", path)
    with parquet.ParquetFile(path, memory_map=True) as file:
        yield from _of_batches(file.iter_batches(batch_size=ROWS_AT_ONCE))


def _read_arrow(path: Path) -> Iterator[DataRow]:
    """Both of Arrow's formats: with a table of contents at the end, and the stream that `datasets` writes."""
    ipc = _arrow("ipc", path)
    with path.open("rb") as file:
        whole = file.read(6) == b"ARROW1"
    with (ipc.open_file if whole else ipc.open_stream)(_arrow("", path).memory_map(str(path))) as reader:
        batches = (reader.get_batch(place) for place in range(reader.num_record_batches)) if whole else reader
        yield from _of_batches(batches)


def _read_dataset(folder: Path) -> Iterator[DataRow]:
    number = 0
    for path in dataset_files(folder):
        for row in _read_arrow(path):
            number += 1
            yield DataRow(number=number, values=row.values)


def _of_batches(batches: Iterator[Any]) -> Iterator[DataRow]:
    number = 0
    for batch in batches:
        for first in range(0, batch.num_rows, ROWS_AT_ONCE):
            for values in batch.slice(first, ROWS_AT_ONCE).to_pylist():
                number += 1
                yield DataRow(
                    number=number, values={name: _without_nulls(value) for name, value in values.items()}
                )


def _without_nulls(value: Any) -> Any:
    """Return a nested value without keys that are null: a struct of Arrow has every key of every row."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value[:1]):
        return [_without_nulls(part) for part in value]
    return value


def _arrow(part: str, path: Path) -> Any:
    """Import pyarrow, or one of its modules."""
    try:
        import importlib

        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError as error:
        raise DataError(f"{path} is read by pyarrow, which is not installed", next=INSTALL) from error


READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
