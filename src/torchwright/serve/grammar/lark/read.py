"""The text of a grammar in Lark's syntax, with llguidance's additions, to its definitions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

NESTED = 100
"""Parentheses in each other at most: they are read by recursion."""
_HEAD = re.compile(
    r'[?!]*([A-Za-z_][\w-]*)(\[(?:"(?:[^"\\\n]|\\.)*"|[^\]"\n])*\])?(?:\.-?\d+)?[ \t]*:', re.ASCII
)
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"(i?)')
_REGEX = re.compile(r"/((?:[^/\\\n]|\\.)+)/([imslux]*)")
_COUNT = re.compile(r"~\s*(\d+)(?:\s*\.\.\s*(\d+))?|\{\s*(\d*)\s*(?:(,)\s*(\d*)\s*)?\}")
_SPACE = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*)+")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "0": "\0"}
_ATTRIBUTE = re.compile(
    r'\s*([a-z_]+)\s*(?:=\s*("(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|[\w.-]+))?\s*(?:,|$)'
)


class LarkRefused(Exception):
    """A grammar that is not understood; the text says which part, and in which line."""


@dataclass(frozen=True)
class Reference:
    name: str


@dataclass(frozen=True)
class Literal:
    text: str
    any_case: bool = False


@dataclass(frozen=True)
class Pattern:
    regex: str
    flags: str = ""


@dataclass(frozen=True)
class Range:
    """One character of a range."""

    first: str
    last: str


@dataclass(frozen=True)
class Schema:
    """A JSON value that a schema describes."""

    schema: Any


@dataclass(frozen=True)
class Choice:
    """One of several sequences."""

    options: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True)
class Times:
    part: Part
    least: int
    most: int | None


Part = Reference | Literal | Pattern | Range | Schema | Choice | Times


@dataclass(frozen=True)
class Definition:
    """A rule, or a terminal where its name has capitals."""

    body: Choice
    attributes: dict[str, str | None]
    line: int


@dataclass
class Grammar:
    """Definitions by name, and what may stand between the terminals of rules."""

    definitions: dict[str, Definition] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    """Name → the name in Lark's library `common`."""
    ignored: list[Part] = field(default_factory=list)


def read(text: str) -> Grammar:
    """Return the definitions of a grammar. Raises `LarkRefused`."""
    return _Reader(text).read()


def unescape(text: str) -> str:
    """Return the text of a string between its quotes."""

    def one(match: re.Match[str]) -> str:
        code = match[1] or match[2] or match[3]
        if code is None:
            return _PLAIN_ESCAPES.get(match[4], match[4])
        return chr(int(code, 16))

    try:
        return _ESCAPE.sub(one, text)
    except ValueError:
        raise LarkRefused(f'the string "{text}" has a character that does not exist') from None


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self._grammar = Grammar()

    def read(self) -> Grammar:
        self._space()
        while self._at < len(self._text):
            if self._text[self._at] == "%":
                self._directive()
            else:
                self._definition()
            self._space()
        return self._grammar

    def _definition(self) -> None:
        head = _HEAD.match(self._text, self._at)
        if head is None:
            raise self._fault("a rule is written as name: …")
        line, self._at = self._line, head.end()
        name = head[1]
        if name in self._grammar.definitions:
            raise self._fault(f"'{name}' is defined twice")
        self._grammar.definitions[name] = Definition(self._choice(), _attributes(head[2] or "[]"), line)
        self._space()
        if not self._ends():
            raise self._fault("this is not understood")

    def _directive(self) -> None:
        word = re.compile(r"%(\w+)").match(self._text, self._at)
        name = word[1] if word else ""
        self._at += len(name) + 1
        if name == "llguidance":
            self._json()
        elif name == "ignore":
            self._grammar.ignored.append(self._choice())
        elif name == "import":
            self._import()
        else:
            raise self._fault(f"%{name} is not supported")

    def _import(self) -> None:
        end = self._text.find("\n", self._at)
        line = self._text[self._at : len(self._text) if end < 0 else end].strip()
        single = re.fullmatch(r"common\.(\w+)(?:\s*->\s*(\w+))?", line)
        several = re.fullmatch(r"common\s*\(([\w\s,]+)\)", line)
        if single:
            self._grammar.imported[single[2] or single[1]] = single[1]
        elif several:
            self._grammar.imported |= {name.strip(): name.strip() for name in several[1].split(",")}
        else:
            raise self._fault("only names of Lark's library common are imported")
        self._at += len(self._text[self._at :].split("\n", 1)[0])

    def _choice(self) -> Choice:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return Choice(tuple(options))

    def _sequence(self) -> tuple[Part, ...]:
        parts = list[Part]()
        self._space()
        while not self._ends() and self._text[self._at] not in "|)]":
            if self._take("->"):
                self._match(_NAME, "a name follows ->")
            else:
                parts.append(self._repeated())
            self._space()
        return tuple(parts)

    def _repeated(self) -> Part:
        part = self._atom()
        while self._at < len(self._text):
            mark = self._text[self._at]
            if mark in "*+?":
                self._at += 1
                part = Times(part, int(mark == "+"), 1 if mark == "?" else None)
            elif count := _COUNT.match(self._text, self._at):
                self._at = count.end()
                part = Times(part, *_counts(count))
            else:
                break
        return part

    def _atom(self) -> Part:
        mark = self._text[self._at]
        if mark in "([":
            self._at += 1
            self._depth += 1
            if self._depth > NESTED:
                raise self._fault(f"more than {NESTED} parentheses in each other")
            inner = self._choice()
            self._depth -= 1
            if not self._take(")" if mark == "(" else "]"):
                raise self._fault(f"'{mark}' is not closed")
            return inner if mark == "(" else Times(inner, 0, 1)
        if mark == '"':
            return self._literal()
        if mark == "/":
            regex = self._match(_REGEX, "the pattern is not closed")
            return Pattern(regex[1], regex[2])
        if self._text.startswith("%json", self._at):
            self._at += len("%json")
            return Schema(self._json())
        if name := _NAME.match(self._text, self._at):
            self._at = name.end()
            return Reference(name[0])
        raise self._fault("this is not understood")

    def _literal(self) -> Part:
        string = self._match(_STRING, "the string is not closed")
        first = unescape(string[1])
        if not self._take(".."):
            return Literal(first, bool(string[2]))
        self._space()
        last = unescape(self._match(_STRING, "a range ends with a string")[1])
        if len(first) != 1 or len(last) != 1 or first > last:
            raise self._fault("a range is of one character to a later one")
        return Range(first, last)

    def _json(self) -> Any:
        self._space()
        try:
            found, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
        except (ValueError, RecursionError):
            raise self._fault("this is not JSON") from None
        return found

    def _ends(self) -> bool:
        """Check for the end of a definition: that of the text, or a line that begins another."""
        if self._at >= len(self._text):
            return True
        before = self._text[self._text.rfind("\n", 0, self._at) + 1 : self._at]
        own = self._text.startswith("%json", self._at)
        return (
            not before.strip()
            and not own
            and bool(self._text[self._at] == "%" or _HEAD.match(self._text, self._at))
        )

    def _take(self, mark: str) -> bool:
        """Step over a mark if it comes next."""
        at = self._at
        self._space()
        if self._ends() or not self._text.startswith(mark, self._at):
            self._at = at
            return False
        self._at += len(mark)
        return True

    def _match(self, pattern: re.Pattern[str], otherwise: str) -> re.Match[str]:
        self._space()
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._fault(otherwise)
        self._at = found.end()
        return found

    def _space(self) -> None:
        if found := _SPACE.match(self._text, self._at):
            self._at = found.end()

    @property
    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _fault(self, text: str) -> LarkRefused:
        return LarkRefused(f"line {self._line}: {text}")


def _attributes(text: str) -> dict[str, str | None]:
    """Return the attributes behind a rule's name, such as [capture="x", stop="y"]."""
    inner, at, found = text[1:-1], 0, dict[str, str | None]()
    while at < len(inner):
        match = _ATTRIBUTE.match(inner, at)
        if match is None:
            raise LarkRefused(f"the attributes {text} are not understood")
        found[match[1]], at = match[2], match.end()
    return found


def _counts(match: re.Match[str]) -> tuple[int, int | None]:
    if match[1] is not None:
        return int(match[1]), int(match[2] or match[1])
    least = int(match[3] or 0)
    if match[4] is None:
        return least, least
    return least, int(match[5]) if match[5] else None
