"""Printing shared by several verbs: plain data as JSON, or as a table for people."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from torchwright.core.escapes import escaped

if TYPE_CHECKING:
    from rich.console import Console


_QUANTITIES = {"bytes": "size", "seconds": "time"}
"""Keys that are units alone → their labels."""


def console() -> Console:
    """Return a console for standard output that escapes what files hold."""
    from torchwright.report.console import SafeConsole

    # Into a pipe or a file the text is as wide as the documentation, not the 80 columns of an unknown terminal.
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return SafeConsole(width=None if known else 100, highlight=False)


def say(text: object = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a line of text that may come from a file, its control characters escaped."""
    click.echo(escaped(str(text)), nl=nl, err=err)


def print_json(value: Any) -> None:
    say(to_json(value))


def to_json(value: Any) -> str:
    """Plain data, dataclasses, sets and paths as JSON."""
    return json.dumps(value, indent=2, allow_nan=False, default=_to_plain)


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is no plain data: {value!r}")


def print_result(title: str, facts: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    screen = console()
    screen.print(title, style="bold")
    screen.print(_facts_table(facts))


def _facts_table(facts: Mapping[str, Any]) -> Any:
    """Return plain data as a two-column table; nested data is indented, lists of rows become tables."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for key, value in facts.items():
        label = Text(_label(key), "cyan")
        if isinstance(value, Mapping):
            grid.add_row(label, _facts_table(value))
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
            columns = list(dict.fromkeys(key for item in value for key in item))
            table = Table(*map(_label, columns), box=None, padding=(0, 1))
            for item in value:
                table.add_row(*(_quantity(column, item.get(column)) for column in columns))
            grid.add_row(label, table)
        elif isinstance(value, list | tuple):
            grid.add_row(label, Text("\n".join(_quantity(key, each) for each in value) or "none"))
        else:
            grid.add_row(label, Text(_quantity(key, value)))
    return grid


def _label(key: str) -> str:
    """Return a key as a label: `peak_memory_bytes` is "peak memory", `aten::as_strided` stays as it is."""
    if not key.isidentifier():
        return key
    if key in _QUANTITIES:
        return _QUANTITIES[key]
    for unit in ("_bytes", "_seconds", "_s"):
        if key.endswith(unit) and not key.endswith("_per_s"):
            return key.removesuffix(unit).replace("_", " ")
    return key.replace("_", " ")


def _quantity(key: str, value: Any) -> str:
    """Return a value with the unit that its key names: 436 MB for `peak_memory_bytes`."""
    from torchwright.report import wording

    if isinstance(value, int | float) and not isinstance(value, bool):
        if key == "bytes" or key.endswith("_bytes"):
            return wording.size(value)
        if key == "seconds" or (key.endswith(("_seconds", "_s")) and not key.endswith("_per_s")):
            return wording.seconds(value)
    return _number(value)


def _number(value: Any) -> str:
    """A value of a table: four significant digits, and never an exponent."""
    if not isinstance(value, float) or not math.isfinite(value):
        return plain(value)
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    text = f"{value:.4g}"
    return text if "e" not in text else f"{value:.{3 - math.floor(math.log10(abs(value)))}f}"


def plain(value: Any) -> str:
    """An option's value as the command line and the documentation write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) or "none"
    return str(value) or "none"
