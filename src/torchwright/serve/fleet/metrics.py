"""The figures of several servers as one text for Prometheus, each sample with the name of its server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

LABEL = "server"
COMMENT = re.compile(r"# (HELP|TYPE) (\S+)(.*)")
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?([ \t]+[-+0-9.eEInfNa]+(?:[ \t]+-?[0-9]+)?)")
"""Name, labels, and value with a time that may follow."""


def join(texts: Mapping[str, str]) -> str:
    """Return one text of the figures in `texts`, by the name of their server, which becomes the label `server`.

    Each family has its HELP and TYPE once, and its samples together, as the format wants. A line that is neither is
    left out: one damaged text must not cost the others.
    """
    comments: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for server, text in texts.items():
        for family, kind, line in _read(text, server):
            if kind:
                comments.setdefault(family, {}).setdefault(kind, line)
            else:
                samples.setdefault(family, []).append(line)
    lines = [
        line
        for family, found in samples.items()
        for line in (*(comments.get(family, {}).get(kind, "") for kind in ("HELP", "TYPE")), *found)
    ]
    return "".join(f"{line}\n" for line in lines if line)


def _read(text: str, server: str) -> Iterator[tuple[str, str, str]]:
    """Yield (family, HELP or TYPE or "", line) of each line."""
    label = f'{LABEL}="{_escaped(server)}"'
    family = ""
    for line in text.splitlines():
        if comment := COMMENT.fullmatch(line):
            family = comment[2]
            yield family, comment[1], line
        elif not line.startswith("#") and (sample := SAMPLE.fullmatch(line)):
            name, labels, value = sample.groups()
            if not family or not name.startswith(family):
                family = name
            yield family, "", f"{name}{{{label}{',' if labels else ''}{labels or ''}}}{value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
