"""Text of Python modules to train on, without what the bundled held-out text has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.harness import run
from torchwright.core.process.files import replacing

PIECE = 4000
"""Characters of a row."""
KNOWN = 200
"""Characters from the middle of a piece by which it is found in the held-out text."""
OTHERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def write_rows(path: Path, roots: Iterable[str], characters: int) -> None:
    """Write pieces of the modules below `roots`, at least `characters` in all if there are as many, as JSON lines."""
    with replacing(path) as beside, beside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": piece}) + "\n" for piece in pieces(map(Path, roots), characters))


def pieces(roots: Iterable[Path], characters: int) -> Iterator[str]:
    """Pieces of modules in the order of their paths, the first root's first."""
    held_out = (run.BUNDLED / "eval.txt").read_text("utf-8")
    total = 0
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if OTHERS & {*path.relative_to(root).parts}:
                continue
            text = path.read_text("utf-8", errors="ignore")
            for piece in (text[start : start + PIECE] for start in range(0, len(text), PIECE)):
                middle = max(0, len(piece) - KNOWN) // 2
                if piece[middle : middle + KNOWN] in held_out:
                    continue
                yield piece
                total += len(piece)
            if total >= characters:
                return
