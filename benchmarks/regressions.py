"""List regressions: figures more than 10% below what an earlier commit proved on the same machine.

    python benchmarks/regressions.py [--json] [--rows FOLDER]

The rows are those of `benchmarks/*.jsonl` and of docs/results.md. Two figures whose 95% intervals overlap are not a
regression, and rows of a tree with changes decide nothing. Exit code 1 if there is a regression, 2 for a file that is
not rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.board import compare
from benchmarks.board.pages import all_rows
from benchmarks.board.rows import BadRow, read


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--rows", type=Path, metavar="FOLDER", help="read the *.jsonl of this folder instead")
    options = parser.parse_args(arguments)
    if options.rows and not options.rows.is_dir():
        parser.error(f"--rows takes a folder of *.jsonl files; {options.rows} is not a folder")
    try:
        rows = read(options.rows) if options.rows else all_rows()
    except BadRow as error:
        print(error, file=sys.stderr)
        return 2
    compared = compare.changes(rows)
    found = compare.regressions(rows)
    if options.json:
        print(json.dumps([as_json(each) for each in found], indent=1))
    else:
        for each in found:
            print(as_text(each))
        print(f"{len(found)} regressions in {len(compared)} comparisons of {len(rows)} rows")
    return int(bool(found))


def as_text(change: compare.Change) -> str:
    before, after = change.before, change.after
    return (
        f"{change.key}: {100 * (change.ratio - 1):+.0f}%\n"
        f"    {_figure(before)} at {before.label} ({before.row.source})\n"
        f"    {_figure(after)} at {after.label} ({after.row.source})\n"
        f"    {after.row.command}"
    )


def as_json(change: compare.Change) -> dict[str, Any]:
    return {**vars(change.key), "ratio": change.ratio} | {
        name: {
            "value": point.value,
            "low": point.low,
            "high": point.high,
            "commit": point.label,
            "source": point.row.source,
            "versions": point.row.versions,
            "command": point.row.command,
        }
        for name, point in (("before", change.before), ("after", change.after))
    }


def _figure(point: compare.Point) -> str:
    return f"{point.value:.2f}x [{point.low:.2f}, {point.high:.2f}]"


if __name__ == "__main__":
    sys.exit(main())
