"""Bounded reading of a run's files: no line, file or folder makes the reader hold more than these limits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from torchwright.core.json_file import decode_json
from torchwright.core.regular_file import open_regular

LARGEST_FILE = 256 << 20
"""Bytes; a run of a million steps has less than that in metrics.jsonl."""
LONGEST_LINE = 1 << 20
"""Bytes; the longest lines of ours are a start's facts, some ten kB."""
MOST_FILES = 10_000
"""Files of one kind in a folder."""
WHOLE = 1 << 63
EPOCH = datetime(1970, 1, 1)

Fault = Callable[[int | None, str], None]
"""Takes the number of a line, or None for the file, and why it is left out."""


def text_lines(path: Path, fault: Fault) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of a regular file, without line ends; longer lines are skipped and reported."""
    try:
        file = open_regular(path)
    except OSError as error:
        fault(None, str(error))
        return
    with file:
        read = 0
        for number in itertools.count(1):
            line = file.readline(LONGEST_LINE)
            read += len(line)
            if not line:
                return
            if read > LARGEST_FILE:
                fault(number, f"more than {LARGEST_FILE >> 20} MiB; the rest of the file is left out")
                return
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                fault(number, f"longer than {LONGEST_LINE} bytes")
                while (line := file.readline(LONGEST_LINE)) and not line.endswith(b"\n"):
                    read += len(line)
                    if read > LARGEST_FILE:
                        fault(number, f"more than {LARGEST_FILE >> 20} MiB; the rest of the file is left out")
                        return
                continue
            yield number, line.rstrip(b"\r\n")


def json_lines(path: Path, fault: Fault) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, object) of a file of JSON lines; what is not an object is skipped and reported."""
    for number, line in text_lines(path, fault):
        try:
            value = decode_json(line)
        except ValueError as error:
            fault(number, f"not JSON, perhaps cut short: {error}")
            continue
        if isinstance(value, dict):
            yield number, value
        else:
            fault(number, "not an object")


def files(folder: Path, pattern: str, fault: Fault) -> list[Path]:
    """Return the files of a folder by name, at most `MOST_FILES`."""
    found = list(itertools.islice(folder.glob(pattern), MOST_FILES + 1))
    if len(found) > MOST_FILES:
        fault(None, f"more than {MOST_FILES:,} files {pattern}; the rest is left out")
    return sorted(found[:MOST_FILES])


def whole(value: Any) -> int | None:
    """Return a whole number that a column holds, else None."""
    return value if type(value) is int and -WHOLE <= value < WHOLE else None


def real(value: Any) -> float | None:
    """Return a number as a float, infinite where it has no end; None for anything else."""
    if type(value) not in (int, float):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def text(value: Any, most: int = 2000) -> str:
    """Return a text without lone surrogates, which no column holds."""
    return str(value)[:most].encode("utf-8", "replace").decode()


def as_json(value: Any, most: int = 20_000) -> str:
    """Return a value as JSON; of a longer one its beginning, as a text."""
    # JSON has no NaN and no infinities: they become texts, which DuckDB's functions read.
    written = json.dumps(json.loads(json.dumps(value), parse_constant=str))
    return written if len(written) <= most else json.dumps({"cut": written[:most]})


def at(nanoseconds: int | None) -> datetime | None:
    """Return a time since 1970 as UTC, to the microsecond; None if no calendar has it."""
    if nanoseconds is None:
        return None
    try:
        return EPOCH + timedelta(microseconds=nanoseconds // 1000)
    except OverflowError:
        return None


def modified(path: Path) -> datetime | None:
    """Return when a file was last written, in UTC."""
    try:
        return datetime.fromtimestamp(path.lstat().st_mtime, UTC).replace(tzinfo=None)
    except (OSError, OverflowError, ValueError):
        return None
