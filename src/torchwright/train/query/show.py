"""Answers as a table for a terminal, as plain data and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from torchwright.report import wording
from torchwright.train.query.database import Answer
from torchwright.train.query.questions import QUESTIONS
from torchwright.train.query.tables import TABLES, Rows

LONGEST_CELL = 200
"""Characters of a cell in a table; JSON and CSV have all of them."""
WIDEST = 100_000
"""Characters of a table that is not folded."""
NAMED = 5
"""Damaged lines that are named under a table; `problems` has more of them."""


def table(answer: Answer) -> RenderableType:
    """Return the answer as a table, numbers to the right; texts alone are folded where it is too wide."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for place, name in enumerate(answer.columns):
        values = [row[place] for row in answer.rows if row[place] is not None]
        grid.add_column(
            Text(wording.elide(name, 80)),
            justify="right" if any(map(is_number, values)) else "left",
            overflow="fold",
            no_wrap=bool(values) and not any(isinstance(value, str) for value in values),
        )
    for row in answer.rows:
        grid.add_row(*(Text(cell(value)) for value in row))
    rows = len(answer.rows)
    words = (
        f"the first {rows:,} rows; --rows takes more" if answer.cut else f"{rows:,} row{'s' * (rows != 1)}"
    )
    return Group(grid, Text(words, style="dim"))


def print_wide(console: Console, answer: Answer) -> None:
    """Print the answer as a table: on a terminal texts are folded but no number is cut, into a pipe nothing is."""
    shown = table(answer)
    size = Measurement.get(console, console.options.update(width=WIDEST), shown)
    console.width = max(console.width, size.minimum if console.is_terminal else size.maximum)
    console.print(shown)


def notes(rows: Rows) -> list[str]:
    """Return the number of damaged lines, and the first ones by name."""
    if not rows.problems:
        return []
    named = [
        f"{run}: {file}{f', line {line}' if line is not None else ''}: {fault}"
        for run, file, line, fault in rows.of["problems"][:NAMED]
    ]
    more = rows.problems - len(named)
    count = f"{rows.problems:,} damaged line{'s' * (rows.problems != 1)} or file{'s' * (rows.problems != 1)} left out"
    return [f"{count} (the table `problems` names them)", *named, *([f"… and {more:,} more"] if more else [])]


def missing(tables: Iterable[str], rows: Rows) -> str | None:
    """Return which files the question needs and none of the runs has; None if there are some."""
    empty = [name for name in tables if not rows.of[name]]
    if not empty:
        return None
    return "no such rows: " + "; ".join(f"`{name}` comes from {TABLES[name].source}" for name in empty)


def cell(value: Any) -> str:
    """Return a value as the text of a cell, on one line."""
    if value is None:
        return wording.MISSING
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds")
    return wording.elide(str(value), LONGEST_CELL)


def is_number(value: Any) -> bool:
    """Check whether a value is aligned as a number."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def plain(answer: Answer, rows: Rows) -> dict[str, Any]:
    """Return the answer as plain data: columns, rows as objects, and what was left out."""
    return {
        "columns": answer.columns,
        "rows": [dict(zip(answer.columns, map(plain_value, row), strict=True)) for row in answer.rows],
        "cut": answer.cut,
        "problems": rows.problems,
    }


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it; NaN and infinities are the texts "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, datetime):
        return value.isoformat() + ("Z" if value.tzinfo is None else "")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(each) for each in value]
    return str(value)


def as_csv(answer: Answer) -> str:
    """Return the answer as CSV with a header."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(answer.columns)
    writer.writerows([plain_value(value) for value in row] for row in answer.rows)
    return file.getvalue()


def listed() -> RenderableType:
    """Return the questions with a name."""
    grid = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for question in QUESTIONS.values():
        grid.add_row(Text(question.name, style="bold"), Text(question.asks))
    return grid


def schema() -> RenderableType:
    """Return the tables and their columns."""
    parts = list[RenderableType]()
    for each in TABLES.values():
        parts.append(Text.assemble((each.name, "bold"), (f"   {each.source}", "dim")))
        grid = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
        for column in each.columns:
            grid.add_row(column.name, Text(column.type, style="dim"), column.meaning)
        parts.append(grid)
    return Group(*parts)


def plain_schema() -> dict[str, Any]:
    """Return the tables and their columns as plain data."""
    return {
        each.name: {
            "source": each.source,
            "columns": [
                {"name": column.name, "type": column.type, "meaning": column.meaning}
                for column in each.columns
            ],
        }
        for each in TABLES.values()
    }


def plain_list() -> list[dict[str, Any]]:
    """Return the questions with a name as plain data."""
    return [
        {"name": question.name, "asks": question.asks, "tables": question.tables, "sql": question.sql.strip()}
        for question in QUESTIONS.values()
    ]
