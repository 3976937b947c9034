"""The reading side: a process's ledger as a list of spans, checked, since it comes from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchwright.core.regular_file import open_regular
from torchwright.train.ledger.buckets import BUCKETS, FOLDER, FORMAT, LedgerError
from torchwright.train.ledger.launcher import Launcher

LONGEST_LINE = 1 << 16
"""Bytes; ours have fewer than 400."""
MOST_FILES = 100_000


@dataclass(frozen=True)
class Span:
    """The content of one line. Times are nanoseconds since 1970 by the clock that the process began with."""

    start: int
    end: int
    spent: dict[str, int]
    """Bucket → nanoseconds; they sum to `end - start`."""
    step: int | None = None
    """The last step completed, if any was in this span."""
    resume: int | None = None
    checkpoint: int | None = None
    found: int | None = None
    """Graphs that were compiled already."""
    made: int | None = None
    """Graphs and files that the compiler made."""


@dataclass
class ProcessLife:
    """One process's life."""

    path: Path
    rank: int
    world: int
    host: str
    launch: str
    launcher: Launcher | None
    every: int
    """Nanoseconds between two lines, at most."""
    start: int
    end: int
    spans: list[Span] = field(default_factory=list)
    finished: bool = False
    """True if it closed its ledger without an exception."""
    failed: bool = False
    """True if it closed its ledger because of an exception."""
    notes: list[str] = field(default_factory=list)


def read_sessions(run_dir: str | Path) -> list[ProcessLife]:
    """Every process's ledger under `run_dir`, by start. Raises `LedgerError` where there is none or one is damaged."""
    run = Path(run_dir)
    folder = run / FOLDER if (run / FOLDER).is_dir() else run
    paths = sorted(folder.glob("rank*.jsonl"))
    if not paths:
        raise LedgerError(
            f"no ledger in {run}",
            found="no folder of that name" if not run.is_dir() else f"no file {FOLDER}/rank*.jsonl",
            next="give the run folder of `torchwright train`",
        )
    if len(paths) > MOST_FILES:
        raise LedgerError(
            f"too many ledgers in {folder}", found=f"{len(paths)}", allowed=f"up to {MOST_FILES}"
        )
    return sorted((read_session(path) for path in paths), key=lambda session: (session.start, session.rank))


def read_session(path: Path) -> ProcessLife:
    """One process's ledger, without a last line that was cut short.

    Raises `LedgerError` for anything else that cannot be right.
    """
    lines = _lines(path)
    header = next(lines, None)
    if header is None or header.get("ledger") != FORMAT:
        raise LedgerError(
            f"{path} is no ledger that this version can read",
            found="no whole first line" if header is None else f"format {header.get('ledger')}",
            allowed=f"format {FORMAT}",
            next="move the file away, or use the version of torchwright that wrote it",
        )
    wall = _whole(header, "wall", path)
    session = ProcessLife(
        path=path,
        rank=_whole(header, "rank", path),
        world=_whole(header, "world", path),
        host=str(header.get("host", "")),
        launch=str(header.get("launch", "")),
        launcher=_launcher(header.get("launcher"), path),
        every=_whole(header, "every", path),
        start=wall,
        end=wall,
    )
    for line in lines:
        session.spans.append(_span(line, session))
        session.end = session.spans[-1].end
        session.finished, session.failed = line.get("end") is True, line.get("end") is False
    return session


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The file's JSON objects. Lines cut short by a full disk or a kill are skipped: the next one has their time."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} cannot be read", found=str(error), next="move it away; the others can be read"
        ) from error
    with file:
        while raw := file.readline(LONGEST_LINE):
            if len(raw) == LONGEST_LINE:
                raise LedgerError(
                    f"{path} has a line longer than {LONGEST_LINE} bytes", next="move the file away"
                )
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield line


def _span(line: dict[str, Any], session: ProcessLife) -> Span:
    end = session.start + _whole(line, "t", session.path)
    spent = line.get("s")
    if not isinstance(spent, dict) or not all(
        name in BUCKETS and type(value) is int and value >= 0 for name, value in spent.items()
    ):
        raise _damaged(session.path, f"seconds {spent}")
    missing = end - session.end - sum(spent.values())
    if missing < 0:
        raise _damaged(session.path, f"a line that counts {-missing / 1e9:.3f} s more than passed")
    if missing:
        session.notes.append(f"{session.path.name}: {missing / 1e9:.3f} s are in no line; they count as idle")
        spent = spent | {"idle": spent.get("idle", 0) + missing}
    marks = {
        name: _whole(line, name, session.path)
        for name in ("step", "resume", "checkpoint", "found", "made")
        if name in line
    }
    return Span(session.end, end, spent, **marks)


def _launcher(raw: Any, path: Path) -> Launcher | None:
    if raw is None:  # or a version that did not say
        return None
    if not isinstance(raw, dict):
        raise _damaged(path, f"launcher = {raw!r}")
    return Launcher(**{name: _whole(raw, name, path) for name in ("pid", "wall", "restarts")})


def _whole(line: dict[str, Any], name: str, path: Path) -> int:
    value = line.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _damaged(path, f"{name} = {value!r}")
    return value


def _damaged(path: Path, found: str) -> LedgerError:
    return LedgerError(
        f"the ledger {path} is damaged", found=found, next="move the file away; the others can be read"
    )
