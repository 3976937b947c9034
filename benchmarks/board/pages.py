"""Fill in the board's two pages; scripts/site_board.py adds them to the site."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, FileSystemLoader
from markupsafe import Markup

from benchmarks.board import compare, statistics, tables
from benchmarks.board.rows import WHOLE, Figure, Row, read
from benchmarks.board.trend import HEIGHT, LEFT, RIGHT, WIDTH, trend
from torchwright.report.html import environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BOARD, STATISTICS = "board/index.html", "board/statistics.html"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the board's table: the newest row of a workload on a device, by technique."""

    number: int
    row: Row
    cells: list[list[Figure]]
    """The figures of each technique, in the order of the columns."""
    fallen: frozenset[str]
    """Measures that are regressions."""

    @property
    def verdict(self) -> str:
        """`regression`, or the verdict of the first figure of the whole recipe."""
        whole = next((each for each in self.row.figures if each.technique == WHOLE), None)
        return "regression" if self.fallen else whole.verdict if whole else "not measured"

    @property
    def measured(self) -> list[str]:
        """The techniques that have a value."""
        return list(dict.fromkeys(each.technique for each in self.row.figures if each.value is not None))


def all_rows(root: Path = ROOT) -> list[Row]:
    """Return the rows of the files in benchmarks/, then those of docs/results.md. Raises `BadRow`."""
    return read(root / "benchmarks") + tables.read(root / "docs" / "results.md")


def render(rows: Sequence[Row]) -> dict[str, str]:
    """Return the pages by their path in the site; every text is escaped, and no page loads anything."""
    found = compare.series(rows)
    trends = [trend(key, points) for key, points in found.items() if len(points) > 1]
    trends.sort(key=lambda each: not each.regression)
    techniques = columns(rows)
    script = (HERE / "board.js").read_text(encoding="utf-8")
    shared: dict[str, Any] = {"numbers": {row.source: number for number, row in enumerate(rows)}}
    board = _template("board.html.j2").render(
        **shared,
        rows=rows,
        techniques=techniques,
        lines=lines(rows, techniques),
        devices=list(dict.fromkeys(row.device for row in rows)),
        regressions=compare.regressions(rows),
        trends=trends,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=RIGHT,
        script=Markup(script),
        digest=digest(script),
    )
    counted = _template("statistics.html.j2").render(
        **shared,
        found=statistics.of(rows),
        machines=statistics.machines(rows),
        changes=compare.changes(rows),
        least=compare.LEAST,
    )
    return {BOARD: board, STATISTICS: counted}


def columns(rows: Sequence[Row]) -> list[str]:
    """Return the techniques that were measured at least once, the whole recipe first, then by how often."""
    counts: dict[str, int] = {WHOLE: 0}
    for row in rows:
        for figure in row.figures:
            if figure.value is not None:
                counts[figure.technique] = counts.get(figure.technique, 0) + 1
    counts.pop(WHOLE)
    return [WHOLE, *sorted(counts, key=lambda name: (-counts[name], name))]


def lines(rows: Sequence[Row], techniques: Sequence[str]) -> list[Line]:
    """Return the newest row of each workload on each device, as lines of the table."""
    newest = {(row.device, row.benchmark, row.workload): number for number, row in enumerate(rows)}
    fallen: dict[str, set[str]] = {}
    for each in compare.regressions(rows):
        fallen.setdefault(each.after.row.source, set()).add(each.key.measure)
    return [
        Line(
            number=number,
            row=rows[number],
            cells=[[each for each in rows[number].figures if each.technique == name] for name in techniques],
            fallen=frozenset(fallen.get(rows[number].source, ())),
        )
        for number in newest.values()
    ]


def digest(script: str) -> str:
    """Return the source that a content security policy allows: this script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _template(name: str) -> Any:
    report = environment()
    assert report.loader is not None
    return report.overlay(loader=ChoiceLoader([FileSystemLoader(HERE), report.loader])).get_template(name)
