"""Pages of which a script writes parts: what stands between `<!-- generated: NAME -->` and `<!-- end generated -->`."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def with_blocks(page: Path, blocks: dict[str, str]) -> str:
    """A page with its marked blocks written afresh."""

    def block(match: re.Match[str]) -> str:
        if match[2] not in blocks:
            raise SystemExit(f"{page.name} marks a block '{match[2]}'; there are {', '.join(blocks)}")
        return match[1] + blocks[match[2]] + match[3]

    return BLOCK.sub(block, page.read_text())


def settle(path: Path, text: str, check: bool) -> list[str]:
    """Write the page; with `check` compare instead, and return the diff."""
    old = path.read_text() if path.exists() else ""
    if old == text:
        return []
    if not check:
        path.write_text(text)
        return []
    name = str(path.relative_to(ROOT))
    diff = difflib.unified_diff(
        old.splitlines(), text.splitlines(), name, f"{name} as the code has it", lineterm=""
    )
    return [*diff, f"{name} is out of step: run `make docs`"]


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
