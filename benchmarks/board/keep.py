"""Append what runs measured to the board's rows, benchmarks/measured.jsonl.

    python -m benchmarks.board.keep FILE…

A FILE is what a benchmark wrote with `--json FILE`; its `records` are appended, a line each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.board.rows import uniform_row

MEASURED = Path(__file__).parents[1] / "measured.jsonl"


def main(arguments: Sequence[str] | None = None, into: Path = MEASURED) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    lines = list[str]()
    for path in parser.parse_args(arguments).files:
        try:
            records = json.loads(path.read_text(encoding="utf-8"))["records"]
            for record in records:
                uniform_row(record, str(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"{path}: not a benchmark's JSON file with records: {error!r}", file=sys.stderr)
            return 2
        lines += [json.dumps(record) + "\n" for record in records]
        print(f"{path}: {len(records)} records")
    with into.open("a", encoding="utf-8") as file:
        file.writelines(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
