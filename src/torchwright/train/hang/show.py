"""The answer in a terminal, as text and as plain data."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchwright.report.console import SafeConsole
from torchwright.train.hang.finding import Finding

WIDTH = 120


def evidence(finding: Finding, notes: list[str] | None = None) -> RenderableType:
    """The answer, and the ranks' parts as a table."""
    parts: list[RenderableType] = [
        Text.assemble(
            (f"{finding.kind}: ", "bold green" if finding.kind == "nothing" else "bold red"), finding.answer
        )
    ]
    if finding.rows:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("rank", justify="right", no_wrap=True)
        for title in ("what it did", "call", "from", "where it is now"):
            table.add_column(title, overflow="fold")
        for row in finding.rows:
            style = "bold" if row.rank in finding.ranks else ""
            cells = (str(row.rank), row.part, row.call, row.line, row.now)
            table.add_row(*(Text(cell) for cell in cells), style=style)
        parts += ["", table]
    parts += [Text(f"note: {note}", style="yellow") for note in (*finding.notes, *(notes or []))]
    return Group(*parts)


def plain_text(finding: Finding) -> str:
    """`evidence` without colours."""
    file = io.StringIO()
    SafeConsole(file=file, width=WIDTH, color_system=None, force_terminal=False).print(evidence(finding))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def plain(finding: Finding, notes: list[str]) -> dict[str, Any]:
    """The answer as JSON."""
    facts = asdict(finding)
    facts["notes"] = [*finding.notes, *notes]
    return {"stuck": finding.kind != "nothing"} | facts
