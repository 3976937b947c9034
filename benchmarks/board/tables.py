"""Read the tables of docs/results.md: ratios from before rows were kept in files, with date, commit and command."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.board.rows import WHOLE, BadRow, Figure, Row, interval

ORIGIN = ("date", "commit", "versions", "command")
"""The columns in which every table of the page ends."""
CELLS = re.compile(r"(?<!\\)\|")
RATIO = re.compile(
    r"(?:(?P<before>[^\d].*?), )?(?P<value>[\d.]+)x(?: \[(?P<low>[\d.]+), (?P<high>[\d.]+)\])?(?: \((?P<after>.*)\))?"
)
"""A cell that holds one ratio, with the name of its contender before it or a remark behind it."""
NUMBER = re.compile(r"[-+]?\d")
UNKNOWN = "not recorded"


def read(path: Path) -> list[Row]:
    """Return the rows that have a ratio; columns without one become facts. Raises `BadRow`."""
    found = list[Row]()
    device = section = ""
    head: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("## "):
            device = section = line[3:].strip()
        elif line.startswith("### "):
            section = line[4:].strip()
        elif not line.startswith("|"):
            head = []
        elif not head:
            head = _cells(line)
        elif not set(line) <= set("|-: "):
            place = f"{path.parent.name}/{path.name}:{number}"
            found += _row(head, _cells(line), device, section, place)
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|").replace("\\*", "*") for cell in CELLS.split(line)[1:-1]]


def _row(head: list[str], cells: list[str], device: str, section: str, place: str) -> list[Row]:
    if tuple(head[-len(ORIGIN) :]) != ORIGIN:
        return []
    if len(cells) != len(head):
        raise BadRow(f"{place}: {len(cells)} cells under {len(head)} columns")
    origin = dict(zip(ORIGIN, cells[-len(ORIGIN) :], strict=True))
    names = [cells[0]]
    body = list(zip(head[1 : -len(ORIGIN)], cells[1 : -len(ORIGIN)], strict=True))
    while body and body[0][1] and not NUMBER.match(body[0][1]) and not RATIO.fullmatch(body[0][1]):
        names.append(body.pop(0)[1])
    figures, facts = list[Figure](), dict[str, str]()
    for column, cell in body:
        match = RATIO.fullmatch(cell)
        if match:
            figures.append(_figure(column, match, place))
        elif cell:
            facts[column] = cell
    if not figures:
        return []
    measured, written = origin["commit"], ""
    if measured.startswith("("):
        measured, written = "", measured.strip("()")
        facts["written down by commit"] = written
    return [
        Row(
            source=place,
            benchmark=f"docs/results.md, {section}",
            workload=": ".join((section, ", ".join(names))) if section != device else ", ".join(names),
            conditions="",
            device=device,
            commit=_known(measured),
            date=_known(origin["date"]),
            versions=_known(origin["versions"]) or UNKNOWN,
            command=origin["command"].strip("`"),
            figures=tuple(figures),
            facts=facts,
        )
    ]


def _figure(column: str, match: re.Match[str], place: str) -> Figure:
    note = ", ".join(filter(None, (match["before"], match["after"])))
    value = float(match["value"])
    low = high = None
    if match["low"]:
        # Rounded for reading: 0.85x of [0.85, 0.85] may have been 0.846.
        low, high = min(float(match["low"]), value), max(float(match["high"]), value)
        try:
            interval((value, low, high))
        except ValueError as error:
            raise BadRow(f"{place}: {error}") from error
    return Figure(technique=WHOLE, measure=column, value=value, low=low, high=high, note=note)


def _known(text: str) -> str | None:
    return None if text in ("", UNKNOWN) else text
