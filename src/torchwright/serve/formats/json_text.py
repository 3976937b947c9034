"""JSON in text that comes in pieces: where a value ends, and the names and arguments of calls.

msgspec decodes: unlike the standard library it takes no half of a surrogate pair, which could not be sent on.
"""

from __future__ import annotations

import json
from typing import Any

from torchwright.serve.grammar.values import decode as decode


class ObjectScanner:
    """Finds the end of a JSON object or array in text that comes in pieces; `depth` brackets are open already."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Return where in `text` the value ends (one past its last bracket), or None while it does not."""
        return self.escaped(text)[1]

    def escaped(self, text: str) -> tuple[str, int | None]:
        """Return the text up to the value's end, and the end as `feed` does.

        Control characters inside of strings, which some models write as they are, are escaped as JSON wants them.
        """
        written: list[str] = []
        start = 0
        for place, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
                elif character < " ":
                    written += text[start:place], json.dumps(character)[1:-1]
                    start = place + 1
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return "".join([*written, text[start : place + 1]]), place + 1
        return "".join([*written, text[start:]]), None


def read_call(text: str) -> tuple[str, str]:
    """Return name and arguments of a call's object, in any order; the name is empty if the text is not a call."""
    found = decode(text)
    if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
        return "", ""
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):  # some models encode them twice
        arguments = decode(arguments)
    if arguments is None:
        arguments = {}
    return (name, dumps(arguments)) if isinstance(arguments, dict) else ("", "")


def unescape(text: str) -> str:
    """Return the text of a JSON string without its quotes; empty for anything else."""
    found = decode(f'"{text}"')
    return found if isinstance(found, str) else ""


def dumps(value: Any) -> str:
    """Return JSON as models write it."""
    return json.dumps(value, ensure_ascii=False)
