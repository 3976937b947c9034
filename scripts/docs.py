"""Write the documentation that the code already knows: the technique tables and the command-line help.

    python scripts/docs.py            writes docs/techniques.md, docs/cli.md, the marked blocks of other pages and the
                                      table that `torchwright techniques` and `workloads` list
    python scripts/docs.py --check    exit code 1 and a diff when one of them is out of step

Either way exit code 1 when a link of a page leads nowhere, or a script that it names is not there.

A marked block stands between `<!-- generated: NAME -->` and `<!-- end generated -->`. docs/serve.md has
`tool formats`, `reasoning formats`, `parameters` (of every request), `refused` and `limits`; docs/log.md is an index of
the entries in docs/log.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from blocks import ROOT, settle, table, with_blocks
from torchwright.cli.group import cli
from torchwright.cli.printing import plain
from torchwright.cli.registries import BUILTINS, LISTED, imported_rows
from torchwright.optimization.techniques.base import describe
from torchwright.optimization.techniques.properties import PROPERTIES
from torchwright.serve.formats.base import ToolFormat
from torchwright.serve.formats.reasoning import REASONING_FORMATS, ReasoningFormat
from torchwright.serve.formats.tools import TOOL_FORMATS
from torchwright.serve.http import reference
from torchwright.serve.http.app import OPERATIONS
from torchwright.serve.http.openapi import Operation
from torchwright.serve.limits import Limits
from torchwright.serve.openai.parse import REFUSED
from torchwright.serve.openai.protocol import SPELLED_OUT, Shared
from torchwright.train.data.layouts import NAMES, public_data_sets
from torchwright.train.query.questions import QUESTIONS
from torchwright.train.query.tables import TABLES

WIDTH = 100
TARGET_GUIDE = ROOT / "docs" / "contributing" / "export-target.md"
TARGET_TEMPLATE = ROOT / "examples" / "numpy_target" / "numpy_target.py"
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
SCRIPT = re.compile(r"\b(?:benchmarks|scripts|examples)/[\w/]+\.py\b")
INTRODUCTION = """`python -m torchwright` is the same command. A shell can complete verbs and options:
[getting started](getting-started.md#shell-completion).
"""
HEADER = "<!-- Written by scripts/docs.py from the code; edit the docstrings instead. -->\n\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 when out of step")
    check = parser.parse_args().check
    listed = {kind: imported_rows(kind) for kind in LISTED}
    rows = listed["techniques"]
    pages = {
        BUILTINS: json.dumps(listed, indent=1, allow_nan=False) + "\n",
        ROOT / "docs" / "techniques.md": techniques_page(rows),
        ROOT / "docs" / "cli.md": cli_page(),
        ROOT / "docs" / "plugins.md": with_blocks(
            ROOT / "docs" / "plugins.md", {"properties": properties_table()}
        ),
        ROOT / "docs" / "log.md": with_blocks(ROOT / "docs" / "log.md", {"log": log_index()}),
        ROOT / "docs" / "train.md": with_blocks(ROOT / "docs" / "train.md", {"data sets": data_sets_table()}),
        ROOT / "docs" / "query.md": with_blocks(ROOT / "docs" / "query.md", query_blocks()),
        ROOT / "docs" / "serve.md": with_blocks(ROOT / "docs" / "serve.md", serve_blocks()),
        TARGET_GUIDE: with_blocks(
            TARGET_GUIDE, {"template": f"```python\n{TARGET_TEMPLATE.read_text()}```\n"}
        ),
    }
    faults = [fault for path, text in pages.items() for fault in settle(path, text, check)]
    faults += [fault for path in _markdown() for fault in [*dead_links(path), *missing_scripts(path)]]
    print(
        "\n".join(faults)
        if faults
        else f"{len(pages)} generated pages, all links and named scripts are in step with the code"
    )
    return 1 if faults else 0


def properties_table() -> str:
    """One row for each property that a technique may name."""
    return table(
        ("property", "the model has it if"), [(f"`{name}`", text) for name, text in PROPERTIES.items()]
    )


def data_sets_table() -> str:
    """One row for each public data set that is known by its columns."""
    return table(
        ("data set", "columns", "read too", "read as"),
        [
            (name, _listed(needs), _listed(also), NAMES[form])
            for name, needs, also, form in public_data_sets()
        ],
    )


def query_blocks() -> dict[str, str]:
    """The questions with a name, and the tables with their columns."""
    questions = [(f"`{each.name}`", each.asks) for each in QUESTIONS.values()]
    tables = [
        (f"`{each.name}`", f"`{each.source}`", ", ".join(f"`{column.name}`" for column in each.columns[1:]))
        for each in TABLES.values()
    ]
    return {
        "questions": table(("question", "answers"), questions),
        "tables": table(("table", "from", "columns, besides `run`"), tables),
    }


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(f"`{column}`" for column in columns)


def techniques_page(rows: list[dict[str, Any]]) -> str:
    """One table of all techniques, then one section each with its options."""
    parts = [HEADER + "# Techniques\n", _techniques_table(rows)]
    parts.append(
        "A technique is asked for by `--with NAME:option=value,option=value` and forbidden by `--without NAME`. Steps\n"
        "are applied in the order of their phases; a step runs only on a model that has the properties it needs.\n"
    )
    for row in rows:
        parts.append(f"## {row['name']}\n\n{row['summary']}\n")
        if row["detail"]:
            parts.append(row["detail"] + "\n")
        facts = [f"Phase: {row['phase']}."]
        facts += [
            f"{key.capitalize()}: {', '.join(row[key])}." for key in ("needs", "gives", "removes") if row[key]
        ]
        parts.append(" ".join(facts) + "\n")
        if row["options"]:
            parts.append(
                table(("option", "type", "default", "meaning"), [_option(o) for o in row["options"]])
            )
    return "\n".join(parts)


def log_index() -> str:
    """Each topic of the log with a link to each of its entries, newest first."""
    parts: list[str] = []
    for page in sorted(
        (ROOT / "docs" / "log").glob("*/*.md"), key=lambda page: (-int(page.parent.name), page.name)
    ):
        name = page.relative_to(ROOT / "docs").as_posix()
        topic, *titles = re.findall(r"^##? (.*)", page.read_text(), re.MULTILINE)
        parts.append(f"### [{topic}]({name})\n\n")
        for title in titles:
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")  # as GitHub makes it
            date, what = title[:10], re.sub(r"^[^:]*: | \([^()]*\)$", "", title[10:])
            parts.append(f"- {date}: [{what.strip(', ')}]({name}#{anchor})\n")
        parts.append("\n")
    return "".join(parts)


def cli_page() -> str:
    """The help text of the command and of every verb."""
    parts = [HEADER + "# Command line\n", INTRODUCTION]
    parts += [f"## {name}\n\n```text\n{text}\n```\n" for name, text in _helps()]
    return "\n".join(parts)


def serve_blocks() -> dict[str, str]:
    """The tables of docs/serve.md: the parameters of each request, what is refused by name, and the limits."""
    requests = [operation for operation in OPERATIONS if operation.body is not None]
    return {
        "tool formats": _formats(TOOL_FORMATS.values()),
        "reasoning formats": _formats(REASONING_FORMATS.values()),
        "parameters": "\n".join(_parameters(operation) for operation in requests),
        "refused": table(
            ("name", "why, or what to use"),
            [(f"`{k}`", v) for k, v in sorted(REFUSED.items())] + _refused(requests),
        ),
        "ignored": table(("name", "requests", "why"), _without_effect(requests)),
        "defaults": table(
            ("name", "values"),
            [(f"`{k}`", ", ".join(f"`{json.dumps(v)}`" for v in v)) for k, v in sorted(SPELLED_OUT.items())],
        ),
        "limits": table(
            ("limit", "value", "of what"),
            [(f"`{row.name}`", f"{row.default:,}", row.doc) for row in describe(Limits)],  # pyright: ignore[reportArgumentType],
        ),
    }


def _formats(rows: Iterable[ToolFormat | ReasoningFormat]) -> str:
    """Return a row for each format: its name, who writes so, and how."""
    return table(
        ("name", "models", "as it is written"),
        [(f"`{row.name}`", row.models, f"`{row.looks}`") for row in rows],
    )


def _without_effect(requests: list[Operation]) -> list[tuple[str, str, str]]:
    """Return the fields that cannot change an answer, with the requests that have them."""
    found: dict[tuple[str, str], list[str]] = {}
    for operation in requests:
        for name, reason in operation.body.without_effect.items() if operation.body else ():
            found.setdefault((name, reason), []).append(f"`{operation.path}`")
    generating = [f"`{o.path}`" for o in requests if o.body and issubclass(o.body, Shared)]
    return [
        (f"`{name}`", "all that generate" if paths == generating else ", ".join(paths), reason)
        for (name, reason), paths in sorted(found.items())
    ]


def _refused(requests: list[Operation]) -> list[tuple[str, str]]:
    """Return the fields that single requests refuse by name, with the reason."""
    return [
        (f"`{name}`, of `{operation.path}`", reason)
        for operation in requests
        if operation.body is not None
        for name, reason in operation.body.refused.items()
    ]


def dead_links(page: Path) -> list[str]:
    """Relative links of a page that lead to no file."""
    targets = [
        target for target in LINK.findall(page.read_text()) if "://" not in target and "mailto:" not in target
    ]
    return [
        f"{page.relative_to(ROOT)}: the link {target} leads nowhere"
        for target in targets
        if not (page.parent / target).exists()
    ]


def missing_scripts(page: Path) -> list[str]:
    """Scripts of this repository that a page names and that do not exist; the log names those of its day."""
    if (ROOT / "docs" / "log") in page.parents:
        return []
    return [
        f"{page.relative_to(ROOT)}: there is no {name}"
        for name in sorted(set(SCRIPT.findall(page.read_text())))
        if not (ROOT / name).exists()
    ]


def _markdown() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def _helps() -> Iterator[tuple[str, str]]:
    """(title, help text) of the command, then of its verbs."""
    top = _context(cli, "torchwright", None)
    yield "torchwright", cli.get_help(top)
    yield from _below(cli, "torchwright", top)


def _below(group: click.Group, title: str, above: click.Context) -> Iterator[tuple[str, str]]:
    """(title, help text) of a group's commands, and of theirs."""
    for name, command in group.commands.items():
        context = _context(command, name, above)
        yield f"{title} {name}", command.get_help(context)
        if isinstance(command, click.Group):
            yield from _below(command, f"{title} {name}", context)


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(
        command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
    )


def _techniques_table(rows: list[dict[str, Any]]) -> str:
    return table(
        ("technique", "phase", "what it does"), [(f"`{r['name']}`", r["phase"], r["summary"]) for r in rows]
    )


def _parameters(operation: Operation) -> str:
    assert operation.body is not None
    rows = [
        (f"`{name}`", kind, value if value == "required" else f"`{value}`", meaning)
        for name, kind, value, meaning in reference.fields(operation.body)
    ]
    fields_table = table(reference.HEAD, rows)
    return f"### {operation.method} {operation.path}\n\n{operation.summary}.\n\n{fields_table}"


def _option(option: dict[str, Any]) -> tuple[str, ...]:
    return f"`{option['name']}`", option["type"], f"`{plain(option['default'])}`", option["doc"]


if __name__ == "__main__":
    sys.exit(main())
