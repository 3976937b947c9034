"""The named questions about runs as one self-contained HTML page: no script, every word escaped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchwright.core.process.files import replacing
from torchwright.report.curves import Chart, chart
from torchwright.report.html import environment
from torchwright.train.query import show
from torchwright.train.query.database import Answer, Database
from torchwright.train.query.questions import QUESTIONS, Question
from torchwright.train.query.tables import MOST_ROWS, Rows

ROWS = 100
"""Rows of a table on the page; a chart has all of them."""

MOST_CHARTS = 8
"""Runs with a chart of their own."""


@dataclass(frozen=True)
class Section:
    """A question and its answer on the page."""

    question: Question
    charts: list[Chart]
    columns: list[tuple[str, bool]]
    """Name, and whether its values are numbers."""
    rows: list[list[str]]
    cut: bool
    missing: str | None


def write(database: Database, rows: Rows, runs: list[str], path: Path) -> None:
    """Write the page under a temporary name, and rename it to `path`; make missing folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        beside.write_text(render(database, rows, runs), encoding="utf-8")


def render(database: Database, rows: Rows, runs: list[str]) -> str:
    """Return the page."""
    sections = [_section(database, question, rows) for question in QUESTIONS.values()]
    return (
        environment()
        .get_template("query.html.j2")
        .render(
            runs=runs,
            sections=[section for section in sections if section.missing is None],
            empty=[section for section in sections if section.missing is not None],
            notes=show.notes(rows),
        )
    )


def _section(database: Database, question: Question, rows: Rows) -> Section:
    missing = show.missing(question.tables, rows)
    if missing is not None:
        return Section(question, [], [], [], False, missing)
    answer = database.ask(question.sql, rows=MOST_ROWS if question.drawn else ROWS)
    listed = answer.rows[:ROWS]
    return Section(
        question,
        _charts(answer, question),
        [(name, any(show.is_number(row[at]) for row in listed)) for at, name in enumerate(answer.columns)],
        [[show.cell(value) for value in row] for row in listed],
        answer.cut or len(answer.rows) > ROWS,
        None,
    )


def _charts(answer: Answer, question: Question) -> list[Chart]:
    """Return a chart for each run, of a question whose figures are drawn."""
    if question.across is None or question.drawn is None:
        return []
    run, across, drawn = (answer.columns.index(name) for name in ("run", question.across, question.drawn))
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in answer.rows:
        if row[drawn] is not None:
            lines.setdefault(row[run], []).append((row[across], row[drawn]))
    title = question.drawn.replace("_per_s", " per second")
    found = [
        chart(f"{title}: {name}", {title: points}, lambda value: f"{value:,.4g}", smooth=True)
        for name, points in list(lines.items())[:MOST_CHARTS]
    ]
    return [each for each in found if each is not None]
