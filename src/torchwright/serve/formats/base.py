"""The base of tool formats: how a family of models writes calls, their parser, and the grammar that enforces them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchwright.serve.formats.json_text import ObjectScanner
from torchwright.serve.formats.reader import CallArguments, CallBegin, Reader, Reading, Text, new_call_id

FREE = {
    "qwen_xml": "<parameter=a>\n…\n</parameter>",
    "glm_xml": "<arg_key>a</arg_key>\n<arg_value>…</arg_value>",
    "const_string": "a=…",
}
"""Kinds of content → how documentation shows it; a JSON object for others."""
Tag = dict[str, Any]
"""A part of xgrammar's structural tags."""


@dataclass(frozen=True, kw_only=True)
class Callable:
    """A function that an answer may call."""

    name: str
    schema: dict[str, Any] = field(default_factory=dict)
    """JSON schema of its arguments, an object."""
    strict: bool = False
    """True if the schema is enforced where the model decides by itself to call."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A way to write calls."""

    name: str
    models: str
    """Who writes so."""
    begin: str = ""
    end: str = ""
    hints: tuple[str, ...] = ()
    """Texts by one of which a chat template tells that it teaches this format."""
    also: str = ""
    """A text that the template holds besides."""
    separator: str = ""
    """Text between two tags."""
    reader: ClassVar[type[CallReader]]
    """The parser of one answer."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which are otherwise no part of an answer's text."""
        return ()

    @property
    def in_one_tag(self) -> bool:
        """True if one tag holds all calls."""
        return False

    @property
    def trigger(self) -> str:
        """The text by which every tag begins."""
        return self.begin

    @property
    def looks(self) -> str:
        """One call, for documentation."""
        written = self.tags([Callable(name="f")])[0]
        return f"{_shown(written)}".replace("\n", "\\n")

    def teaches(self, source: str) -> bool:
        """Check whether a chat template's source teaches this format."""
        return any(hint in source for hint in self.hints) and self.also in source

    def parser(self, functions: Sequence[Callable], *, parallel: bool = True) -> Reader:
        """Return the parser of one answer; `parallel` False ends with the first call."""
        return self.reader(self, functions, parallel=parallel)

    def tags(self, functions: Sequence[Callable], *, parallel: bool = True) -> list[Tag]:
        """Return structural tags of calls of these functions."""
        raise NotImplementedError

    def required(self, functions: Sequence[Callable], *, parallel: bool) -> Tag:
        """Return the grammar of an answer that is nothing but calls, at least one."""
        return separated(
            self.tags(functions, parallel=parallel), self.separator, single=not parallel or self.in_one_tag
        )

    def strict(self, functions: Sequence[Callable]) -> Tag | None:
        """Return the grammar of free text whose calls of strict functions match their schema; None without any."""
        if not any(function.strict for function in functions):
            return None
        free = [function if function.strict else self._loosened(function) for function in functions]
        return {"type": "triggered_tags", "triggers": [self.trigger], "tags": self.tags(free)}

    def _loosened(self, function: Callable) -> Callable:
        """Return a function whose arguments may be any object."""
        return Callable(name=function.name, schema={"type": "object"})


def separated(tags: list[Tag], separator: str, *, single: bool) -> Tag:
    """Return tags one after the other, at least one."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": single,
    }


def tag(begin: str, content: Tag, end: str) -> Tag:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def structural_tag(form: Tag) -> str:
    """Return a structural tag as the text that is compiled."""
    return json.dumps({"type": "structural_tag", "format": form})


def _shown(form: Tag) -> str:
    """Return a structural tag as a text that it takes, `…` for what is free."""
    if form["type"] == "tag":
        return form["begin"] + _shown(form["content"]) + form["end"]
    if form["type"] == "tags_with_separator":
        return _shown(form["tags"][0])
    return FREE.get(form.get("style", form["type"]), "{…}")


class CallReader(Reader):
    """The base of parsers of calls. What only looks like a call, or calls an unknown function, is text."""

    def __init__(self, form: Any, functions: Sequence[Callable], *, parallel: bool = True) -> None:
        """`form` is the format whose reader this is."""
        super().__init__()
        self._form = form
        self._functions = {function.name: function for function in functions}
        self._parallel = parallel
        self.begun = 0
        """Calls that have begun."""

    def _calls(self, mark: str) -> Reading[bool]:
        """Read calls behind `mark`; False where the text does not go on as the format has it."""
        raise NotImplementedError

    def _section(self, mark: str, ends: Sequence[str] = ()) -> Reading[None]:
        """Read the calls behind a mark, and the rest as text. The answer's end may cut the closing marks `ends`."""
        first = self.begun
        whole = yield from self._calls(mark)
        left = self._taken + self._buffer if self._ended else self._taken
        cut = self._ended and self.begun > first and any(end.startswith(left.strip()) for end in ("", *ends))
        if not whole and not cut:
            self._emit(Text, self._taken)
        if cut:
            self._buffer = ""
        self._forget()

    def _read_marked(self, *marks: str, ends: Sequence[str] = ()) -> Reading[None]:
        """Read an answer of text and of calls behind marks."""
        while mark := (yield from self._pass(Text, *marks)):
            yield from self._section(mark, ends)
            if self.done:
                return
        yield from self._last_text()

    def _last_text(self) -> Reading[None]:
        """Emit what is left at the answer's end, but for white space behind calls."""
        while (yield from self._more()):
            pass
        if self._buffer.strip() or not self.begun:
            self._emit(Text, self._buffer)
        self._buffer = ""

    def _begin(self, name: str) -> int:
        """Begin a call and return its index."""
        self._forget()
        self._events.append(CallBegin(self.begun, new_call_id(), name))
        self.begun += 1
        return self.begun - 1

    def _argue(self, index: int, text: str) -> None:
        """Emit a piece of a call's arguments."""
        self._forget()
        if text:
            self._events.append(CallArguments(index, text))

    def _end(self) -> bool:
        """End a call; True where another may follow."""
        self._forget()
        self.done = not self._parallel
        return self._parallel

    def _stream_object(self, index: int) -> Reading[bool]:
        """Emit an object as a call's arguments while it comes; False where the answer ends within it."""
        scanner = ObjectScanner()
        while True:
            text, end = scanner.escaped(self._buffer)
            self._take(len(self._buffer) if end is None else end)
            self._argue(index, text)
            if end is not None:
                return True
            if not (yield from self._more()):
                return False

    def _whole_object(self, depth: int = 0) -> Reading[str | None]:
        """Take a JSON value, or the rest of one in which `depth` brackets are open; None where it does not end."""
        scanner, scanned = ObjectScanner(depth), 0
        while (end := scanner.feed(self._buffer[scanned:])) is None:
            scanned = len(self._buffer)
            if not (yield from self._more()):
                return None
        return self._take(scanned + end)
