"""The tables that a query sees: columns, types and meanings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchwright.core.errors import TorchwrightError

MOST_ROWS = 500_000
"""Rows of one table over all runs: some hundred MB of Python objects while they are loaded."""
MOST_PROBLEMS = 1000
"""Damaged lines that are named; further ones are counted."""
Row = Sequence[Any]


class QueryError(TorchwrightError):
    """A question that cannot be answered, or a run folder with nothing to ask about."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    type: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """A table, with the files that its rows come from."""

    name: str
    source: str
    columns: tuple[Column, ...]


_RUN = Column("run", "VARCHAR", "the folder or file, as it was given")


def _table(name: str, source: str, *columns: tuple[str, str, str]) -> Table:
    return Table(name, source, (_RUN, *(Column(*column) for column in columns)))


TABLES = {
    table.name: table
    for table in (
        _table(
            "attempts",
            "ledger/rank*.jsonl",
            ("attempt", "BIGINT", "number of this start of the job, from 1"),
            ("started", "TIMESTAMP", "UTC, as all times"),
            ("ended", "TIMESTAMP", ""),
            ("wall_s", "DOUBLE", "seconds from start to end"),
            ("world", "BIGINT", "processes"),
            ("how_ended", "VARCHAR", "finished, failed, died, or running or dead"),
            ("resumed_step", "BIGINT", "the step of the checkpoint from which it began"),
            ("reached_step", "BIGINT", "the last step that any rank completed"),
            ("saved_step", "BIGINT", "the newest step with a whole checkpoint"),
            ("graphs_found", "BIGINT", "compiled graphs that were there already"),
            ("graphs_compiled", "BIGINT", "graphs that were compiled"),
        ),
        _table(
            "ledger",
            "ledger/rank*.jsonl",
            ("attempt", "BIGINT", "NULL between two attempts"),
            ("rank", "BIGINT", "NULL between two attempts"),
            ("cause", "VARCHAR", "a bucket of time-report: step, data_wait, lost_work, recovery, …"),
            ("started", "TIMESTAMP", ""),
            ("seconds", "DOUBLE", ""),
            ("ranks", "BIGINT", "ranks of the attempt: sum(seconds / ranks) is wall time"),
        ),
        _table(
            "steps",
            "metrics.jsonl",
            ("step", "BIGINT", ""),
            ("tokens", "DOUBLE", "tokens seen so far"),
            ("samples", "DOUBLE", "samples seen so far"),
            ("epoch", "DOUBLE", ""),
            ("loss", "DOUBLE", ""),
            ("validation_loss", "DOUBLE", "of the evaluation after this step"),
            ("lr", "DOUBLE", "learning rate"),
            ("grad_norm", "DOUBLE", ""),
            ("tokens_per_s", "DOUBLE", ""),
            ("samples_per_s", "DOUBLE", ""),
            ("mfu", "DOUBLE", "share of the peak rate of operations"),
            ("memory_bytes", "DOUBLE", "peak"),
            ("effective_time", "DOUBLE", "share of the time so far spent on steps"),
        ),
        _table(
            "metrics",
            "metrics.jsonl",
            ("step", "BIGINT", ""),
            ("name", "VARCHAR", "every figure, those without a column in `steps` too"),
            ("value", "DOUBLE", ""),
        ),
        _table(
            "events",
            "metrics.jsonl",
            ("line", "BIGINT", "number of the line in the file"),
            ("event", "VARCHAR", "start, evaluation, stopped, end, …"),
            ("step", "BIGINT", ""),
            ("facts", "VARCHAR", "the whole line, as JSON"),
        ),
        _table(
            "checkpoints",
            "checkpoints/step-*/checkpoint.json",
            ("step", "BIGINT", ""),
            ("tokens", "BIGINT", ""),
            ("files", "BIGINT", "files of all processes"),
            ("bytes", "BIGINT", ""),
            ("written", "TIMESTAMP", "when it was whole"),
        ),
        _table(
            "dumps",
            "stuck/rank_*.json, stuck/finished/rank_*.json",
            ("rank", "BIGINT", ""),
            ("world", "BIGINT", ""),
            ("taken", "TIMESTAMP", ""),
            ("reason", "VARCHAR", "why the dump was taken"),
            ("failed", "BOOLEAN", "an exception had ended the rank"),
            ("finished", "BOOLEAN", "the rank had come to its end"),
            ("stands", "VARCHAR", "the program's line at which it stood"),
        ),
        _table(
            "calls",
            "stuck/rank_*.json, stuck/finished/rank_*.json",
            ("rank", "BIGINT", ""),
            ("group_name", "VARCHAR", "backend and process group"),
            ("seq", "BIGINT", "number among the group's calls, equal on all ranks"),
            ("op", "VARCHAR", "all_reduce, broadcast, send, …"),
            ("what", "VARCHAR", "with shapes and types"),
            ("created", "TIMESTAMP", "by the rank's clock"),
            ("done", "BOOLEAN", "it has ended"),
            ("peer", "BIGINT", "the other rank of a send or a receive"),
            ("place", "VARCHAR", "the program's line"),
        ),
        _table(
            "requests",
            "*.log of a server with --log-requests",
            ("time", "TIMESTAMP", "end of the request; the log's local time as this machine reads it"),
            ("id", "VARCHAR", "the header x-request-id"),
            ("method", "VARCHAR", ""),
            ("path", "VARCHAR", ""),
            ("status", "BIGINT", "499: the client left"),
            ("reason", "VARCHAR", "done, the reason that the answer ended for, or the error's message"),
            ("seconds", "DOUBLE", "from the first byte to the end of the answer"),
            ("prompt_tokens", "BIGINT", ""),
            ("new_tokens", "BIGINT", ""),
            ("user_name", "VARCHAR", "the request's `user`"),
        ),
        _table(
            "log",
            "*.log",
            ("file", "VARCHAR", ""),
            ("line", "BIGINT", ""),
            ("time", "TIMESTAMP", "NULL for the lines of a traceback, or of another program"),
            ("logger", "VARCHAR", ""),
            ("level", "VARCHAR", ""),
            ("message", "VARCHAR", ""),
        ),
        _table(
            "problems",
            "every file above",
            ("file", "VARCHAR", ""),
            ("line", "BIGINT", ""),
            ("fault", "VARCHAR", "why the line or the file was left out"),
        ),
    )
}
"""Name → table, in the order in which `--schema` lists them."""


@dataclass
class Rows:
    """The rows of all tables, at most `most` each."""

    most: int = MOST_ROWS
    of: dict[str, list[Row]] = field(default_factory=lambda: {name: [] for name in TABLES})
    problems: int = 0
    """Faults found, the ones that are not named too."""
    full: set[str] = field(default_factory=set[str])

    def add(self, table: str, rows: Iterable[Row]) -> None:
        """Append rows; of a full table no more are taken, which is a problem of its own."""
        held = self.of[table]
        for row in rows:
            if len(held) >= self.most:
                if table not in self.full:
                    self.full.add(table)
                    self.problem(
                        str(row[0]), table, None, f"more than {self.most:,} rows; the rest is left out"
                    )
                return
            held.append(row)

    def problem(self, run: str, file: str, line: int | None, fault: str) -> None:
        """Count a fault, and name it unless there are too many."""
        self.problems += 1
        if len(self.of["problems"]) < MOST_PROBLEMS:
            self.of["problems"].append((run, file, line, fault[:500]))
