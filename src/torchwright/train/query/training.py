"""The rows of a training run's ledger, figures and checkpoints (no torch)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchwright.core.errors import TorchwrightError
from torchwright.train.ledger.account import Account, Attempt, account_of
from torchwright.train.ledger.buckets import FOLDER as LEDGER
from torchwright.train.ledger.buckets import NANO
from torchwright.train.ledger.read import ProcessLife, read_session
from torchwright.train.ledger.show import how_ended
from torchwright.train.query.lines import (
    LARGEST_FILE,
    Fault,
    as_json,
    at,
    files,
    json_lines,
    modified,
    real,
    text,
    whole,
)
from torchwright.train.query.tables import TABLES, Row, Rows
from torchwright.train.run.observe.history import History
from torchwright.train.run.observe.metrics import FILE as METRICS
from torchwright.train.run.runtime import described

STEPS = tuple(column.name for column in TABLES["steps"].columns[2:])
"""The figures with a column of their own."""
UNFINISHED = (".new", ".old")


def add_ledger(run: str, folder: Path, rows: Rows) -> None:
    """Add the attempts of a run and the pieces of their time."""
    sessions = list[ProcessLife]()
    for path in files(folder / LEDGER, "rank*.jsonl", _fault(rows, run, LEDGER)):
        fault = _fault(rows, run, f"{LEDGER}/{path.name}")
        try:
            if path.lstat().st_size > LARGEST_FILE:
                fault(None, f"more than {LARGEST_FILE >> 20} MiB")
                continue
            for _ in json_lines(path, fault):  # the ledger's reader skips cut lines without a word
                pass
            sessions.append(read_session(path))
        except (OSError, TorchwrightError) as error:
            fault(None, str(error))
    if not sessions:
        return
    sessions.sort(key=lambda session: (session.start, session.rank))
    account = account_of(sessions)
    rows.add("attempts", (_attempt(run, each, account) for each in account.attempts))
    rows.add("ledger", _pieces(run, account))


def _attempt(run: str, attempt: Attempt, account: Account) -> Row:
    return (
        run,
        attempt.number,
        at(attempt.start),
        at(attempt.end),
        (attempt.end - attempt.start) / NANO,
        attempt.world,
        how_ended(attempt, last=attempt is account.attempts[-1]),
        attempt.resumed,
        attempt.reached,
        attempt.saved,
        attempt.found,
        attempt.made,
    )


def _pieces(run: str, account: Account) -> Iterator[Row]:
    """Yield the pieces of every rank, and the time between attempts, so that all of them are the wall time."""
    before: Attempt | None = None
    for attempt in account.attempts:
        if before is not None and attempt.start > before.end:
            yield run, None, None, "idle", at(before.end), (attempt.start - before.end) / NANO, 1
        for rank, lane in attempt.lanes.items():
            for cause, start, end in lane:
                yield run, attempt.number, rank, cause, at(start), (end - start) / NANO, len(attempt.lanes)
        before = attempt


def add_metrics(run: str, folder: Path, rows: Rows) -> None:
    """Add the figures and events of metrics.jsonl."""
    history, fault = History(), _fault(rows, run, METRICS)
    events = list[Row]()
    for number, line in json_lines(folder / METRICS, fault):
        if "event" in line:
            step = whole(line.get("at", line.get("step")))
            events.append((run, number, text(line["event"], 200), step, as_json(line)))
        if whole(line.get("step", line.get("at", 0))) is None:
            fault(number, f"no step: {str(line.get('step', line.get('at')))[:40]}")
            continue
        history.add(line)
    figures = sorted(history.figures.items())
    rows.add("steps", ((run, step, *(real(found.get(name)) for name in STEPS)) for step, found in figures))
    rows.add(
        "metrics",
        ((run, step, text(name, 200), real(found[name])) for step, found in figures for name in found),
    )
    rows.add("events", events)


def add_checkpoints(run: str, folder: Path, rows: Rows) -> None:
    """Add the checkpoints that lie in a run folder; older ones were removed when newer ones were whole."""
    found = folder / described.FOLDER
    for path in files(found, "step-*", _fault(rows, run, described.FOLDER)):
        name = f"{described.FOLDER}/{path.name}"
        if path.name.endswith(UNFINISHED):
            _fault(rows, run, name)(None, "not whole: a process is writing it, or died while it did")
            continue
        try:
            content = described.describe(path)
        except TorchwrightError as error:
            _fault(rows, run, name)(None, str(error))
            continue
        rows.add("checkpoints", [_checkpoint(run, path, content)])


def _checkpoint(run: str, path: Path, content: described.Described) -> Row:
    sizes = [size for file in content.files if (size := _size(path / file)) is not None]
    return (
        run,
        whole(content.step),
        whole(content.tokens),
        len(content.files),
        sum(sizes),
        modified(path / described.DESCRIPTION),
    )


def _size(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None


def _fault(rows: Rows, run: str, file: str) -> Fault:
    return lambda line, reason: rows.problem(run, file, line, reason)
