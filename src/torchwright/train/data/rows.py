"""Rows of the files that hold rows: JSON lines, Parquet, Arrow, and folders that `datasets` saved.

Each is read front to back, a piece at a time. What is no row is told by its number and left to the caller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torchwright.train.data.shards import DataError

LONGEST_LINE = 1 << 26
"""Bytes of one JSON line; the rest of a longer one is passed over unread."""
ROWS_AT_ONCE = 256
STATE, SPLITS = "state.json", "dataset_dict.json"
"""What `datasets` writes into the folder of a data set, and of several splits of one."""
INSTALL = "pip install 'torchwright[data]'"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a file, or what is wrong with it."""

    number: int
    """Its line, or its place among rows, from 1."""
    values: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file or folder. Raises `DataError` for one that cannot be read at all, or not without pyarrow."""
    try:
        yield from _reader(path)(path)
    except (OSError, ValueError) as error:  # pyarrow's are children of these
        raise DataError(f"{path} cannot be read", found=str(error), next="make or fetch it again") from error


def is_rows(path: Path) -> bool:
    """Whether a file or folder holds rows, by its name or by what lies in it."""
    return path.suffix in READERS or is_dataset(path)


def is_dataset(path: Path) -> bool:
    """Whether a folder is one that `datasets` saved."""
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


def _reader(path: Path) -> Callable[[Path], Iterator[Row]]:
    return _read_dataset if path.is_dir() else READERS[path.suffix]


def _read_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                _pass_over(file)
                yield Row(number=number, fault=f"the line has more than {LONGEST_LINE:,} bytes")
            elif line.strip():
                yield _parsed(number, line)


def _pass_over(file: BinaryIO) -> None:
    """The rest of a line, of which little is in memory at a time."""
    while (piece := file.readline(1 << 20)) and not piece.endswith(b"\n"):
        pass


def _parsed(number: int, line: bytes) -> Row:
    try:
        values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return Row(number=number, fault=f"no UTF-8: {error.reason} at byte {error.start:,}")
    except json.JSONDecodeError as error:
        return Row(number=number, fault=f"no JSON: {error.msg} at character {error.pos + 1:,}")
    except (RecursionError, ValueError) as error:  # a number of too many digits
        return Row(number=number, fault=f"JSON that cannot be read: {error}")
    if not isinstance(values, dict):
        return Row(number=number, fault=f"no object, but {type(values).__name__}")
    return Row(number=number, values=values)


def _read_parquet(path: Path) -> Iterator[Row]:
    parquet = _arrow("parquet", path)
    with parquet.ParquetFile(path, memory_map=True) as file:
        yield from _of_batches(file.iter_batches(batch_size=ROWS_AT_ONCE))


def _read_arrow(path: Path) -> Iterator[Row]:
    """Both of Arrow's formats: with a table of contents at the end, and the stream that `datasets` writes."""
    ipc = _arrow("ipc", path)
    with path.open("rb") as file:
        whole = file.read(6) == b"ARROW1"
    with (ipc.open_file if whole else ipc.open_stream)(_arrow("", path).memory_map(str(path))) as reader:
        batches = (reader.get_batch(place) for place in range(reader.num_record_batches)) if whole else reader
        yield from _of_batches(batches)


def _read_dataset(folder: Path) -> Iterator[Row]:
    number = 0
    for path in dataset_files(folder):
        for row in _read_arrow(path):
            number += 1
            yield Row(number=number, values=row.values)


def _of_batches(batches: Iterator[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for first in range(0, batch.num_rows, ROWS_AT_ONCE):
            for values in batch.slice(first, ROWS_AT_ONCE).to_pylist():
                number += 1
                yield Row(number=number, values=values)


def _arrow(part: str, path: Path) -> Any:
    """pyarrow, or a part of it."""
    try:
        import importlib

        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError as error:
        raise DataError(f"{path} is read by pyarrow, which is not installed", next=INSTALL) from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
