"""The registries as plain rows, and as people read them.

`registries.json` holds the rows of the built-ins, written by `scripts/docs.py`: listing them imports no torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

from torchwright.cli.printing import console, plain, print_json
from torchwright.core.json_file import read_json
from torchwright.core.process.interrupts import importing
from torchwright.core.registry import added

BUILTINS = Path(__file__).with_name("registries.json")
LISTED = {"techniques": "torchwright.optimization.techniques", "workloads": "torchwright.workloads"}
"""The registries with a verb that lists them, by the module that has a registry of the same name."""


def list_rows(kind: str) -> list[dict[str, Any]]:
    """Return the rows of a registry in `LISTED`: of the generated table, unless another package adds to it."""
    if added(f"torchwright.{kind}"):
        return imported_rows(kind)
    return read_json(BUILTINS)[kind]


def imported_rows(kind: str) -> list[dict[str, Any]]:
    """Return the rows of a registry in `LISTED`, read from its classes: this imports torch."""
    with importing():
        return describe_registry(getattr(importlib.import_module(LISTED[kind]), kind))


def describe_registry(registry: Any) -> list[dict[str, Any]]:
    """A registry as plain rows: name, first line and rest of the docstring, phase, properties, options."""
    rows: list[dict[str, Any]] = []
    for name, cls in registry:
        summary, _, detail = inspect.cleandoc(cls.__doc__ or "").partition("\n")
        row: dict[str, Any] = {"name": name, "summary": summary, "detail": detail.strip()}
        if hasattr(cls, "phase"):
            row["phase"] = cls.phase.name.lower()
            row |= {key: sorted(getattr(cls, key)) for key in ("needs", "gives", "removes")}
        rows.append(row | {"options": _options(cls)})
    return rows


def _options(cls: type) -> list[dict[str, Any]]:
    """A dataclass's fields with the docstrings under them; of another class the keyword arguments."""
    if dataclasses.is_dataclass(cls):
        from torchwright.optimization.techniques.base import describe

        rows = describe(cls)  # pyright: ignore[reportArgumentType]
        return [dataclasses.asdict(row) | {"required": False} for row in rows]
    return [
        {
            "name": parameter.name,
            "type": _annotation(parameter.annotation),
            "default": None if parameter.default is parameter.empty else parameter.default,
            "doc": "",
            "required": parameter.default is parameter.empty,
        }
        for parameter in inspect.signature(cls).parameters.values()
    ]


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def print_registry(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    blocks: list[Any] = []
    for row in rows:
        title = Text.assemble((row["name"], "bold"), (f"  {row['phase']}" if "phase" in row else "", "dim"))
        blocks += [title, Padding(Text(row["summary"]), (0, 0, 0, 2))]
        if row["options"]:
            table = Table.grid(padding=(0, 2))
            for option in row["options"]:
                table.add_row(
                    Text(option["name"], "cyan"),
                    Text(option["type"], "dim"),
                    Text("required" if option["required"] else f"= {plain(option['default'])}"),
                    Text(option["doc"]),
                )
            blocks.append(Padding(table, (0, 0, 0, 4)))
    console().print(Group(*blocks))
