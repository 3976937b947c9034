"""A hook of MkDocs (mkdocs.yml): links that leave docs/ become the path of the file in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **context: Any) -> str:
    """Return a page's text without links to files that the site does not have."""
    root = Path(context["config"]["docs_dir"])
    return without_outside_links(markdown, root / page.file.src_uri, root)


def without_outside_links(markdown: str, page: Path, root: Path) -> str:
    """Return the text with each link out of `root` replaced by its words and the path in the repository."""

    def replaced(match: re.Match[str]) -> str:
        target = (page.parent / match[2]).resolve()
        if target.is_relative_to(root.resolve()):
            return match[0]
        path = target.relative_to(root.resolve().parent).as_posix()
        return match[1] if match[1].strip("`") == path else f"{match[1]} (`{path}`)"

    return LINK.sub(replaced, markdown)
