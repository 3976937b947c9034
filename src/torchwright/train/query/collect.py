"""The rows of all runs that a question is about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchwright.train.query import recorder, server, training
from torchwright.train.query.tables import MOST_ROWS, QueryError, Rows

MOST_RUNS = 1000


def collect(runs: Sequence[Path], most: int = MOST_ROWS) -> Rows:
    """Read the tables of runs: folders of `torchwright train`, folders with server logs or dumps, and log files.

    A table has at most `most` rows; a problem says where one is cut.
    Raises `QueryError` for a path that does not exist or holds none of these.
    """
    if len(runs) > MOST_RUNS:
        raise QueryError("too many runs", found=f"{len(runs)}", allowed=f"up to {MOST_RUNS}")
    rows = Rows(most=most)
    for path in dict.fromkeys(runs):
        before = _held(rows)
        _add(path, rows)
        if _held(rows) == before:
            raise QueryError(
                f"there is nothing to ask about in {path}",
                found="no such folder" if not path.exists() else "no ledger, figures, dumps or logs",
                next="name the run folder of `torchwright train`, or the log of `torchwright serve`",
            )
    return rows


def _add(path: Path, rows: Rows) -> None:
    run = str(path)
    if not path.is_dir():
        if path.exists():
            server.add_log(run, path, rows)
        return
    training.add_ledger(run, path, rows)
    if (path / training.METRICS).exists():
        training.add_metrics(run, path, rows)
    training.add_checkpoints(run, path, rows)
    recorder.add_dumps(run, path, rows)
    server.add_logs(run, path, rows)


def _held(rows: Rows) -> int:
    return rows.problems + sum(map(len, rows.of.values()))
