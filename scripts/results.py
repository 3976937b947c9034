"""Rows for docs/results.md from what a benchmark wrote with `--json FILE`. Run it at the commit that was measured.

python scripts/results.py FILE…        prints a table for each file, to be pasted under its machine
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for file in parser.parse_args().files:
        written = datetime.fromtimestamp(file.stat().st_mtime, UTC)
        print(table(json.loads(file.read_text()), f"{written:%Y-%m-%d}", commit()))


def commit() -> str:
    """The commit of the working tree; a tree with changes says so."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=, changed"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(found: dict[str, Any], date: str, commit: str) -> str:
    """A heading with the machine, and a row for each of the benchmark's, with all that says how it came to be."""
    machine, rows = found["machine"], found["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("torch", "transformers", "python") if name in machine
    )
    command = f"`{machine.get('command', 'not recorded')}`"
    lines = [[*columns, "date", "commit", "versions", "command"]]
    lines.append(["---"] * len(lines[0]))
    lines += [[*(_cell(row.get(key)) for key in columns), date, commit, versions, command] for row in rows]
    return f"## {machine['cpu']}, {machine['threads']} threads\n\n" + "".join(map(_line, lines))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return (
            f"{value:.4g}"
            if 1e-3 <= abs(value) < 1e4 or value == 0
            else f"{value:,.6f}".rstrip("0").rstrip(".")
        )
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    main()
