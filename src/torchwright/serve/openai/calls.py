"""Reading a model's tool calls as they appear: what is text, where a call begins, and the pieces of its arguments.

JSON is read by msgspec: unlike the standard library it takes no half of a surrogate pair, which could not be sent on.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from torchwright.serve.openai.tools import ToolFormat

HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
HEADER_CHARACTERS = 1024
"""A call begins within so many; a longer beginning is read as a whole object."""
PYTHON_TAG = "<|python_tag|>"
ID_CHARACTERS, ID_LENGTH = string.ascii_letters + string.digits, 9
"""Of a call's id: some chat templates (Mistral's) refuse to read back ids of any other form."""


@dataclass(frozen=True)
class Text:
    """Text of the answer beside its calls."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of a function, whose arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments, as the model wrote them."""

    index: int
    text: str


Event = Text | CallBegin | CallArguments


State = Literal["text", "plain", "between", "call", "arguments", "closing", "ending", "done"]


class CallParser:
    """Reads one answer as it appears. What only looks like a call, or calls an unknown function, is text."""

    def __init__(self, form: ToolFormat, names: Sequence[str], *, parallel: bool = True) -> None:
        self.begun = self.calls = 0
        """Calls that have begun, and that have ended."""
        self._form, self._names, self._parallel = form, frozenset(names), parallel
        self._state: State = "text" if form.begin else "between"
        self._buffer = ""
        self._scanner = ObjectScanner()
        self._scanned = 0
        self._mark = ""
        """What stood before what may be a call: text again if it is none."""

    @property
    def done(self) -> bool:
        """Whether the one call that is wanted has ended; what follows is dropped."""
        return self._state == "done"

    def put(self, text: str) -> list[Event]:
        """What more text brings."""
        self._buffer += text
        events: list[Event] = []
        while getattr(self, f"_{self._state}")(events):
            pass
        return events

    def rest(self) -> list[Event]:
        """What was held back when no more text comes; arguments that were cut off stay as they are."""
        held, self._buffer = self._buffer, ""
        if self._state == "call":
            return [Text(self._mark + held)]
        if self._state in ("arguments", "closing", "ending") or (self.begun and not held.strip()):
            return []
        return [Text(held)] if held else []

    # Each state takes what it can from the buffer and returns whether another state may go on.

    def _text(self, events: list[Event]) -> bool:
        """Before a call; white space is held back, because before a call it belongs to no text."""
        marker = self._form.begin.strip()
        before, found, after = self._buffer.partition(marker)
        shown = before.rstrip() if found else before[: len(before) - _held(before, marker)].rstrip()
        if shown:
            events.append(Text(shown))
        if found:
            self._mark = before[len(shown) :] + marker
            self._enter("call", after)
        else:
            self._buffer = self._buffer[len(shown) :]
        return bool(found)

    def _plain(self, events: list[Event]) -> bool:
        """After something that is no call, in a form without a mark for calls."""
        if self._buffer:
            events.append(Text(self._buffer))
            self._buffer = ""
        return False

    def _between(self, events: list[Event]) -> bool:
        """Llama 3: at the beginning, or after a call."""
        start = self._buffer.lstrip("; \n\t" if self.calls else None)
        if PYTHON_TAG.startswith(start) and start != PYTHON_TAG:
            return False
        if start.startswith(PYTHON_TAG):
            self._enter("between", start.removeprefix(PYTHON_TAG))
        elif start.startswith("{"):
            self._enter("call", start)
        else:
            self._enter("plain", self._buffer)
        return True

    def _call(self, events: list[Event]) -> bool:
        if (match := HEADER.match(self._buffer, 0, HEADER_CHARACTERS)) and (
            name := _unescape(match[1])
        ) in self._names:
            self._begin(events, name)
            self._enter("arguments", self._buffer[match.end() :])
            return True
        start, end = self._buffer.lstrip(), 0
        if not start:
            return False
        if start[0] == "{":
            found = self._scanner.feed(self._buffer[self._scanned :])
            if found is None:
                self._scanned = len(self._buffer)
                return False
            end = self._scanned + found
            name, arguments = _read_call(self._buffer[:end])
            if name in self._names:  # its parts are in another order
                self._begin(events, name)
                events.append(CallArguments(self.begun - 1, arguments))
                self._enter("ending", self._buffer[end:])
                return True
        events.append(Text(self._mark + self._buffer[:end]))
        self._enter("text" if self._form.end else "plain", self._buffer[end:])
        return True

    def _arguments(self, events: list[Event]) -> bool:
        end = self._scanner.feed(self._buffer)
        taken = self._buffer if end is None else self._buffer[:end]
        if taken:
            events.append(CallArguments(self.begun - 1, taken))
        if end is None:
            self._buffer = ""
            return False
        self._enter("closing", self._buffer[end:])
        return True

    def _closing(self, events: list[Event]) -> bool:
        """After the arguments: the call's own brace."""
        start = self._buffer.lstrip()
        if start:
            self._enter("ending", start.removeprefix("}"))
        return bool(start)

    def _ending(self, events: list[Event]) -> bool:
        """After the call's object: the mark that ends a call, where the form has one."""
        mark, start = self._form.end.strip(), self._buffer.lstrip()
        if start != mark and mark.startswith(start) and mark:
            return False
        self.calls += 1
        following: State = "text" if mark else "between"
        self._enter(following if self._parallel else "done", start.removeprefix(mark))
        return True

    def _done(self, events: list[Event]) -> bool:
        self._buffer = ""
        return False

    def _begin(self, events: list[Event], name: str) -> None:
        id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
        events.append(CallBegin(self.begun, id, name))
        self.begun += 1

    def _enter(self, state: State, buffer: str) -> None:
        self._state, self._buffer = state, buffer
        self._scanner, self._scanned = ObjectScanner(), 0


class ObjectScanner:
    """Finds the end of a JSON object or array in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Where in `text` the value ends (one past its last bracket), or None while it does not."""
        for place, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


def _read_call(text: str) -> tuple[str, str]:
    """Name and arguments of a call whose parts are in another order; no name where it is none."""
    try:
        found = msgspec.json.decode(text)
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(found.get("name"), str) and isinstance(arguments, dict):
            return found["name"], json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    return "", ""


def _unescape(text: str) -> str:
    """The text of a JSON string, empty where it is none."""
    try:
        return msgspec.json.decode(f'"{text}"', type=str)
    except ValueError:
        return ""


def _held(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
