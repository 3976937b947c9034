"""Calls as JSON objects: one behind each mark, several in a list, or arguments behind the function's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchwright.serve.formats.base import Callable, CallReader, Tag, ToolFormat, separated, tag
from torchwright.serve.formats.json_text import ObjectScanner, read_call, unescape
from torchwright.serve.formats.reader import Reading
from torchwright.serve.grammar.compile import WHITESPACE

HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
HEADER_CHARACTERS = 1024
"""A call begins within so many; a longer beginning is read as a whole object."""
NAME_CHARACTERS = 256
"""A function's name behind a mark is shorter."""


def arguments_of(function: Callable) -> Tag:
    """Return the grammar of a function's arguments as JSON."""
    return {"type": "json_schema", "json_schema": function.schema, "max_whitespace_cnt": WHITESPACE}


class ObjectCallReader(CallReader):
    """Reads calls whose name and arguments stand in one object."""

    def _call(self) -> Reading[bool]:
        """Read one object; True where it is a call of a known function."""
        scanner, scanned = ObjectScanner(), 0
        yield from self._space()
        if not self._buffer.startswith("{"):
            return False
        while True:
            match = HEADER.match(self._buffer, 0, HEADER_CHARACTERS)
            if match and (name := unescape(match[1])) in self._functions:
                self._take(match.end())
                index = self._begin(name)
                if (yield from self._stream_object(index)):
                    yield from self._whole_object(depth=1)  # further parts, such as an id
                return True
            if (end := scanner.feed(self._buffer[scanned:])) is not None:
                name, arguments = read_call(self._take(scanned + end))
                if name not in self._functions:
                    return False
                self._argue(self._begin(name), arguments)
                return True
            scanned = len(self._buffer)
            if not (yield from self._more()):
                self._take(len(self._buffer))
                return False

    def _list(self) -> Reading[bool]:
        """Read calls in a list whose bracket is taken."""
        while True:
            if not (yield from self._call()):
                return False
            if not self._end():
                return True
            yield from self._space()
            if (yield from self._literal(",")) is None:
                return (yield from self._literal("]")) is not None


def object_tag(function: Callable, key: str = "arguments", begin: str = "", end: str = "") -> Tag:
    """Return the grammar of one call as an object."""
    return tag(f'{begin}{{"name": "{function.name}", "{key}": ', arguments_of(function), "}" + end)


class _MarkedObjects(ObjectCallReader):
    """Reads one object or a list of them behind each mark."""

    def _read(self) -> Reading[None]:
        begins, end = (self._form.begin, *self._form.begins), self._form.end
        return self._read_marked(*(begin.strip() for begin in begins), ends=[end.strip()])

    def _calls(self, mark: str) -> Reading[bool]:
        yield from self._space()
        if (yield from self._literal("[")):
            whole = yield from self._list()
        else:
            whole = yield from self._call()
            if whole:
                self._end()
        end = self._form.end.strip()
        if whole and end and mark == self._form.begin.strip() and not self.done:
            yield from self._space()
            whole = (yield from self._literal(end)) is not None
        return whole


@dataclass(frozen=True, kw_only=True)
class ObjectFormat(ToolFormat):
    """`begin`, an object with the name and the arguments or a list of such objects, `end`."""

    begins: tuple[str, ...] = ()
    """Other texts in place of `begin`."""
    separator: str = "\n"
    reader = _MarkedObjects

    @property
    def trigger(self) -> str:
        return self.begin.strip()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end)))

    def tags(self, functions: Sequence[Callable], *, parallel: bool = True) -> list[Tag]:
        return [object_tag(function, begin=self.begin, end=self.end) for function in functions]


@dataclass(frozen=True, kw_only=True)
class ListFormat(ObjectFormat):
    """`begin`, a list of objects, `end`."""

    separator: str = ""

    @property
    def in_one_tag(self) -> bool:
        return True

    def tags(self, functions: Sequence[Callable], *, parallel: bool = True) -> list[Tag]:
        return [list_tag(self.begin, functions, self.end, parallel=parallel)]


def list_tag(begin: str, functions: Sequence[Callable], end: str, *, parallel: bool) -> Tag:
    """Return the grammar of calls as a list of objects."""
    calls = separated([object_tag(function) for function in functions], ", ", single=not parallel)
    return tag(begin + "[", calls, "]" + end)


class _BareObjects(ObjectCallReader):
    def _read(self) -> Reading[None]:
        space = yield from self._space()
        if self._buffer.startswith(("{", "[")):
            yield from self._section("")
        else:
            self._forget()
            self._buffer = space + self._buffer
        if not self.done:
            yield from self._read_marked(*self._form.begins)

    def _calls(self, mark: str) -> Reading[bool]:
        yield from self._space()
        if (yield from self._literal("[")):
            return (yield from self._list())
        while True:
            if not (yield from self._call()):
                return False
            if not self._end():
                return True
            yield from self._space()
            if (yield from self._literal(";", ",", "<|python_end|>")):
                yield from self._space()
            if not self._buffer.startswith("{"):
                self._buffer, self._taken = self._taken + self._buffer, ""
                return True


@dataclass(frozen=True, kw_only=True)
class BareFormat(ToolFormat):
    """Objects without a mark, at the beginning of the answer or behind one of `begins`."""

    begins: tuple[str, ...]
    separator: str = "; "
    reader = _BareObjects

    @property
    def trigger(self) -> str:
        return '{"name": "'

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.begins, "<|python_end|>")

    def tags(self, functions: Sequence[Callable], *, parallel: bool = True) -> list[Tag]:
        return [object_tag(function, "parameters") for function in functions]


class _NamedReader(CallReader):
    """Reads calls whose arguments stand behind the function's name."""

    def _read(self) -> Reading[None]:
        form = self._form
        return self._read_marked(form.begin or form.open, ends=[form.close + form.end, form.end])

    def _calls(self, mark: str) -> Reading[bool]:
        form = self._form
        if not form.begin:
            return (yield from self._named())
        while True:
            yield from self._space()
            if (yield from self._literal(form.open)) is None:
                return (yield from self._literal(form.end)) is not None
            if not (yield from self._named()):
                return False
            if self.done:
                return True

    def _named(self) -> Reading[bool]:
        """Read a call whose opening mark is taken."""
        form = self._form
        found = yield from self._until(form.middle.strip(), limit=NAME_CHARACTERS)
        name = found[0].strip() if found else ""
        yield from self._space()
        if name not in self._functions or not self._buffer.startswith("{"):
            return False
        if (yield from self._stream_object(self._begin(name))):
            yield from self._space()
            if form.close and (yield from self._literal(form.close.strip())) is None:
                self._end()
                return False
            self._end()
        return True


@dataclass(frozen=True, kw_only=True)
class NamedFormat(ToolFormat):
    """`begin`, and for each call `open`, the function's name, `middle`, its arguments, `close`; then `end`."""

    open: str
    middle: str
    close: str = ""
    tokens: tuple[str, ...] = ()
    """Special tokens."""
    reader = _NamedReader

    @property
    def marks(self) -> tuple[str, ...]:
        return self.tokens

    @property
    def trigger(self) -> str:
        return self.begin or self.open

    @property
    def in_one_tag(self) -> bool:
        return bool(self.begin)

    def tags(self, functions: Sequence[Callable], *, parallel: bool = True) -> list[Tag]:
        calls = [
            tag(self.open + function.name + self.middle, arguments_of(function), self.close)
            for function in functions
        ]
        if not self.begin:
            return calls
        return [tag(self.begin, separated(calls, self.separator, single=not parallel), self.end)]
