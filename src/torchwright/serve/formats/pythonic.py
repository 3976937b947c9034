"""Calls as Python writes them: `[f(a=1), g(b="x")]`, or one on each line."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchwright.serve.formats.base import Callable, CallReader, Tag, ToolFormat, separated, tag
from torchwright.serve.formats.json_calls import NAME_CHARACTERS
from torchwright.serve.formats.json_text import dumps
from torchwright.serve.formats.reader import Reading, Text
from torchwright.serve.grammar.compile import WHITESPACE

NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(")
JSON_NAMES = {"true": True, "false": False, "null": None}
ONE_OF_SEVERAL = 8
"""Optional arguments that are enforced one by one at most: their grammar grows with the square of their number."""


class _PythonicReader(CallReader):
    def __init__(self, form: PythonicFormat, functions: Sequence[Callable], *, parallel: bool) -> None:
        super().__init__(form, functions, parallel=parallel)
        self._begin_mark, self._end_mark, self._outer = form.begin.strip(), form.end.strip(), form.outer

    def _read(self) -> Reading[None]:
        if len(self._begin_mark) > 1:
            yield from self._read_marked(self._begin_mark, ends=[self._end_mark])
            return
        yield from self._space()
        if self._outer and (yield from self._literal(self._outer[0])):
            yield from self._space()
        if (yield from self._literal(self._begin_mark)):
            yield from self._section(self._begin_mark, [self._end_mark])
        else:
            self._buffer, self._taken = self._taken + self._buffer, ""
        if self.done:
            return
        while (yield from self._pass(Text, *(self._outer or ("\x00",)))):
            self._forget()
        yield from self._last_text()

    def _calls(self, mark: str) -> Reading[bool]:
        while True:
            yield from self._space()
            if not (yield from self._call()):
                return False
            if not self._end():
                return True
            yield from self._space()
            yield from self._literal(",")
            yield from self._space()
            if (yield from self._literal(self._end_mark)) is not None:
                return True

    def _call(self) -> Reading[bool]:
        while (match := NAME.match(self._buffer)) is None:
            word = re.fullmatch(r"\s*([A-Za-z_][\w.-]*\s*)?", self._buffer)
            if word is None or len(self._buffer) > NAME_CHARACTERS or not (yield from self._more()):
                return False
        name = match[1]
        if name not in self._functions:
            return False
        scanner, scanned = _CallScanner(), 0
        while (end := scanner.feed(self._buffer[scanned:])) is None:
            scanned = len(self._buffer)
            if not (yield from self._more()):
                self._take(len(self._buffer))
                return False
        arguments = read_arguments(self._take(scanned + end)[match.end() - 1 :])
        if arguments is None:
            return False
        self._argue(self._begin(name), arguments)
        return True


@dataclass(frozen=True, kw_only=True)
class PythonicFormat(ToolFormat):
    """`begin`, calls with `separator` between them, `end`; without marks only at the beginning of the answer."""

    between: str = ", "
    outer: tuple[str, ...] = ()
    """Special tokens around the whole, which the model may leave out."""
    reader = _PythonicReader

    @property
    def in_one_tag(self) -> bool:
        return True

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.outer, *(mark.strip() for mark in (self.begin, self.end) if mark.startswith("<")))

    def tags(self, functions: Sequence[Callable], *, parallel: bool = True) -> list[Tag]:
        calls = [tag(f"{function.name}(", _arguments(function.schema), ")") for function in functions]
        return [tag(self.begin, separated(calls, self.between, single=not parallel), self.end)]

    def _loosened(self, function: Callable) -> Callable:
        """Return the function itself: the grammar of keyword arguments needs their names."""
        return function


class _CallScanner:
    """Finds the bracket that ends a Python call in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> int | None:
        for place, character in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        return None


def read_arguments(text: str) -> str | None:
    """Return `(name=value, …)` as a JSON object; None where it is not made of literals."""
    try:
        call = ast.parse(f"f{_on_one_line(text)}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            return None
        written = dumps({str(word.arg): _literal(word.value) for word in call.keywords})
        written.encode()  # half of a surrogate pair cannot be sent on
        return written
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _on_one_line(text: str) -> str:
    """Escape line breaks inside of strings, which some models write as they are."""
    scanner, written = _CallScanner(), list[str]()
    for character in text:
        written.append("\\n" if character == "\n" and scanner._quote else character)
        scanner.feed(character)
    return "".join(written)


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, with JSON's names for constants too."""
    if isinstance(node, ast.Name) and node.id in JSON_NAMES:
        return JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is not a string")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(f"a {type(value).__name__} is not JSON")
    return value


def _arguments(schema: dict[str, Any]) -> Tag:
    """Return the grammar of keyword arguments: required ones first, then optional ones in their order."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = [name for name in properties if name in schema.get("required", ())]
    optional = [name for name in properties if name not in required][:ONE_OF_SEVERAL]
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    one = {name: _argument(name, properties[name], shared) for name in (*required, *optional)}
    parts: list[Tag] = []
    for name in required:
        parts += [_constant(", "), one[name]] if parts else [one[name]]
    rest = [_optional([_constant(", "), one[name]]) for name in optional]
    if parts:
        return {"type": "sequence", "elements": [*parts, *rest]}
    firsts = [
        {"type": "sequence", "elements": [one[name], *rest[place + 1 :]]}
        for place, name in enumerate(optional)
    ]
    return {"type": "optional", "content": {"type": "or", "elements": firsts}} if firsts else _constant("")


def _argument(name: str, schema: Any, shared: dict[str, Any]) -> Tag:
    whole = {**shared, **schema} if isinstance(schema, dict) else schema
    value = {"type": "json_schema", "json_schema": whole, "max_whitespace_cnt": WHITESPACE}
    return {"type": "sequence", "elements": [_constant(f"{name}="), value]}


def _constant(text: str) -> Tag:
    return {"type": "const_string", "value": text}


def _optional(elements: list[Tag]) -> Tag:
    return {"type": "optional", "content": {"type": "sequence", "elements": elements}}
