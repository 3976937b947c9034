"""Read files of rows, front to back, a block at a time: Criteo-like TSV, gzip and Parquet; report broken rows by
line.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from torchwright.core.errors import unknown
from torchwright.core.rows import DataRow, read_rows
from torchwright.train.data.documents import FileReport
from torchwright.train.data.shards import DataError
from torchwright.train.recommender.columns import Columns

FORMS = (".tsv", ".tsv.gz", ".parquet")
BLOCK = 4096
"""Rows that are converted together."""
LONGEST_LINE = 1 << 16
"""Bytes; a longer one is a broken row."""
Numbered = tuple[int, list[str] | str]
"""A line or row by its number from 1: its fields, or what is wrong with it."""


def read_blocks(
    path: Path, columns: Columns, report: FileReport, *, header: bool, strict: bool
) -> Iterator[np.ndarray]:
    """The file's rows as `Columns.convert` gives them, in blocks; what becomes of each is kept in `report`.

    Raises `DataError` for a file that cannot be read or that holds no row, and, if `strict`, for its first broken row.
    """
    rows = _parquet(path, columns) if path.suffix == ".parquet" else _tsv(path, columns, header)
    try:
        while block := list(itertools.islice(rows, BLOCK)):
            converted = _convert(block, columns, report)
            if strict and report.broken:
                number, reason = report.listed[0]
                raise DataError(
                    f"line {number} of {path} is broken",
                    found=reason,
                    next="mend it, or set data.strict = false",
                )
            report.rows += len(block)
            report.documents += len(converted)
            yield converted
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read", found=str(error), next="make or fetch it again") from error
    if not report.documents:
        reasons = "; ".join(f"{number}: {reason}" for number, reason in report.listed[:3])
        raise DataError(
            f"{path} holds no row to train on",
            found=f"{report.rows:,} rows, {report.broken:,} broken" + (f" ({reasons})" if reasons else ""),
        )


def _convert(block: list[Numbered], columns: Columns, report: FileReport) -> np.ndarray:
    """Together where every row can be read, else one by one."""
    fields = [row for _, row in block if not isinstance(row, str)]
    if len(fields) == len(block):
        try:
            return columns.convert(fields)
        except ValueError:
            pass
    found = [np.empty((0, columns.width), np.int32)]
    for number, row in block:
        if isinstance(row, str):
            report.refuse(number, row)
            continue
        try:
            found.append(columns.convert([row]))
        except ValueError:
            report.refuse(number, columns.explain(row))
    return np.concatenate(found)


def _tsv(path: Path, columns: Columns, header: bool) -> Iterator[Numbered]:
    with _opened(path) as file:
        places = None
        for number, line in _lines(file):
            if line is None:
                yield number, f"the line has more than {LONGEST_LINE:,} bytes"
                continue
            try:
                fields = line.decode("utf-8").rstrip("\r\n").split("\t")
            except UnicodeDecodeError as error:
                yield number, f"no UTF-8: {error.reason} at byte {error.start:,}"
                continue
            if not header:
                yield number, fields
            elif places is None:
                places, count = _places(path, fields, columns), len(fields)
            elif len(fields) != count:
                yield number, f"{len(fields)} fields in place of {count}"
            else:
                yield number, [fields[place] for place in places]


def _opened(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """(number, line), None in place of one that is too long."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            while (piece := file.readline(LONGEST_LINE)) and not piece.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip(b"\r\n"):
            yield number, line


def _places(path: Path, there: list[str], columns: Columns) -> list[int]:
    for name in columns.names:
        if name not in there:
            raise unknown(f"column of {path}", name, there)
    return [there.index(name) for name in columns.names]


def _parquet(path: Path, columns: Columns) -> Iterator[Numbered]:
    for row in read_rows(path):
        if row.number == 1:
            _places(path, list(row.values), columns)
        yield row.number, _texts(row, columns)


def _texts(row: DataRow, columns: Columns) -> list[str] | str:
    """A row's values as a TSV file has them."""
    values = [row.values[name] for name in columns.names]
    strange = next((value for value in values if not isinstance(value, str | int | float | None)), None)
    if strange is not None:
        return f"a value is of type {type(strange).__name__}"
    return [_text(value) for value in values]


def _text(value: str | float | None) -> str:
    """Whole numbers may be kept as floats, and missing ones as NaN, where a column has both."""
    if value is None or value != value:
        return ""
    whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
    return str(int(value)) if whole else str(value)


def form_of(path: Path) -> str:
    """The suffix that says how a file is read; raises `DataError` for another."""
    for form in FORMS:
        if path.name.endswith(form):
            return form
    raise DataError(
        f"{path} is of no known form", found=path.name, allowed=", ".join(f"*{form}" for form in FORMS)
    )
