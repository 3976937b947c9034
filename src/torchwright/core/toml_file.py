"""TOML from a file that somebody else may have written: its size and depth are limited."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from torchwright.core.regular_file import read_regular

LARGEST = 2**20
"""Bytes; the longest run file that is known here has 4 KB."""
DEEPEST = 32
DOTTED = re.compile(rb"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){%d}""" % DEEPEST)
"""A key of too many parts; the parser takes the square of their number."""


def load_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file says; raise `OSError`, and `ValueError` for a file that is not TOML or too deep."""
    try:
        data = read_regular(path, LARGEST)
        if DOTTED.search(data):
            raise RecursionError
        found = tomllib.loads(data.decode())
    except RecursionError as error:
        raise ValueError(f"tables and lists more than {DEEPEST} deep") from error
    _check_depth(found)
    return found


def _check_depth(found: dict[str, Any]) -> None:
    """Raise `ValueError` for values that nest too deeply; dotted keys nest as well, without brackets."""
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise ValueError(f"tables and lists more than {DEEPEST} deep")
