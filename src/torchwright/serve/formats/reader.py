"""The parser of an answer: text in, in any pieces; reasoning, text and tool calls out.

A parser is a generator that yields where it needs more text, so that a format reads like its description.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A step of a parser: yields while it waits for text and returns what it read."""
ID_CHARACTERS, ID_LENGTH = string.ascii_letters + string.digits, 9
"""A call's id: some chat templates (Mistral's) refuse to read back ids of any other form."""


@dataclass(frozen=True)
class Text:
    """Text of the answer, without reasoning and calls."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning, which comes before the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of a function, whose arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments, as JSON text."""

    index: int
    text: str


Event = Text | Reasoning | CallBegin | CallArguments


class Parser(Protocol):
    """Interface of every answer parser."""

    @property
    def done(self) -> bool:
        """True once the one call that is wanted has ended; further text is dropped."""
        ...

    @property
    def reasoning(self) -> bool:
        """True while the text is reasoning."""
        ...

    def put(self, text: str) -> list[Event]:
        """Return the events that more text brings."""
        ...

    def rest(self) -> list[Event]:
        """Return the events of the text that was held back, once no more comes."""
        ...


class Plain:
    """The parser of an answer without a format: everything is text."""

    done = reasoning = False

    def put(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def rest(self) -> list[Event]:
        return []


class Reader:
    """The base of parsers: a buffer, and the steps by which formats take text from it."""

    def __init__(self) -> None:
        self.done = self.reasoning = False
        self._buffer = ""
        self._taken = ""
        """Raw text since the last `_forget`: shown as text where it turns out to be no call."""
        self._ended = False
        self._events: list[Event] = []
        self._steps: Reading[None] | None = None

    def put(self, text: str) -> list[Event]:
        self._buffer += text
        return self._advance()

    def rest(self) -> list[Event]:
        self._ended = True
        return self._advance()

    def _read(self) -> Reading[None]:
        """Read the whole answer."""
        raise NotImplementedError

    def _advance(self) -> list[Event]:
        if self._steps is None:
            self._steps = self._read()
        next(self._steps, None)
        if self.done:
            self._buffer = ""
        events, self._events = self._events, []
        return merged(events)

    def _more(self) -> Reading[bool]:
        """Wait for more text; False at the answer's end."""
        size = len(self._buffer)
        while len(self._buffer) == size:
            if self._ended:
                return False
            yield
        return True

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        self._taken += taken
        return taken

    def _forget(self) -> None:
        self._taken = ""

    def _emit(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        if text:
            self._events.append(kind(text))

    def _space(self) -> Reading[str]:
        """Take white space."""
        while not self._buffer.strip():
            if not (yield from self._more()):
                break
        return self._take(len(self._buffer) - len(self._buffer.lstrip()))

    def _literal(self, *options: str) -> Reading[str | None]:
        """Take the longest option that the text goes on with; None where none does."""
        while any(len(option) > len(self._buffer) and option.startswith(self._buffer) for option in options):
            if not (yield from self._more()):
                break
        found = max((option for option in options if self._buffer.startswith(option)), key=len, default=None)
        if found is not None:
            self._take(len(found))
        return found

    def _until(self, *marks: str, limit: int | None = None) -> Reading[tuple[str, str] | None]:
        """Take the text before the first of the marks, and the mark; None where none comes within `limit`."""
        longest, searched = max(map(len, marks)), 0
        while True:
            if found := first_mark(self._buffer, marks, searched):
                at, mark = found
                if limit is not None and at > limit:
                    return None
                before = self._take(at)
                self._take(len(mark))
                return before, mark
            searched = max(0, len(self._buffer) - longest + 1)
            if (limit is not None and searched > limit) or not (yield from self._more()):
                return None

    def _pass(self, kind: type[Text] | type[Reasoning], *marks: str) -> Reading[str | None]:
        """Emit text up to the first of the marks, which is taken; None at the answer's end.

        White space is held back, because before a mark it belongs to neither side.
        """
        while True:
            found = first_mark(self._buffer, marks)
            end = found[0] if found else len(self._buffer) - held(self._buffer, marks)
            shown = self._buffer[:end].rstrip()
            self._emit(kind, self._take(len(shown)))
            if shown:
                self._forget()
            if found:
                self._forget()
                self._take(found[0] - len(shown) + len(found[1]))
                return found[1]
            if not (yield from self._more()):
                return None


def first_mark(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Return the place of the first mark in `text` and the mark, the longest of those that begin there."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark, start)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None


def held(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a mark."""
    longest = max(map(len, marks))
    sizes = range(min(longest - 1, len(text)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def merged(events: Sequence[Event]) -> list[Event]:
    """Join neighbouring pieces of the same text."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif (
            isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index
        ):
            found[-1] = CallArguments(last.index, last.text + event.text)
        else:
            found.append(event)
    return found


def new_call_id() -> str:
    """Return a new call's id."""
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
