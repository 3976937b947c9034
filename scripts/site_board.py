"""A hook of MkDocs (mkdocs.yml): the board and its statistics, made from the rows that benchmarks wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))


def on_files(files: Any, config: Any) -> Any:
    """Add the board's pages to the site's files. Raises `BadRow` for a file that is not rows."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    from benchmarks.board.pages import all_rows, render

    for path, content in render(all_rows()).items():
        files.append(File.generated(config, path, content=content))
    return files
