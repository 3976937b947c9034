"""Rules of a grammar in EBNF while they are made, and how texts and languages are written in it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from torchwright.serve.grammar.schema.language import (
    NOTHING,
    Alt,
    Automaton,
    Cat,
    Chars,
    Node,
    Ranges,
    Repeat,
    automaton,
    complement,
    is_plain,
    nullable,
    union,
    within,
)

WHITESPACE = 24
"""Characters of white space between two parts of JSON at most, so that a weak model cannot write it for ever."""
UNROLLED = 100
"""Counts up to this one are left to xgrammar, which gives each a state. From 128 on it keeps all of them alive."""
BASE = 32
"""Larger counts are written in units of so many, of so many again, and so on."""
MOST_RULES = 5000
"""Rules of a grammar at most: one of more takes longer to compile than a request may wait."""
SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
UNESCAPED: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))
"""Characters that stand for themselves in a JSON string."""
ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))


class Overgrown(Exception):
    """A grammar of more than `MOST_RULES` rules."""


class GrammarRules:
    """Rules by name, in the order in which they were asked for.

    JSON strings escape the characters of `escaping` besides those that JSON wants escaped.
    """

    def __init__(self, escaping: str = "") -> None:
        own = Chars(union((ord(character), ord(character)) for character in escaping))
        self.unescaped = within(UNESCAPED, complement(own.ranges))
        self._escaped = union([*ESCAPED, *own.ranges])
        self._escaping = escaping
        self._bodies: dict[str, str | None] = {}
        self._numbers = itertools.count()
        self._languages: dict[tuple[Node, bool], str] = {}

    def new(self) -> str:
        """Return the name of a rule whose body comes later."""
        if len(self._bodies) >= MOST_RULES:
            raise Overgrown
        name = f"r{next(self._numbers)}"
        self._bodies[name] = None
        return name

    def define(self, name: str, body: str) -> None:
        """Give a new rule its body."""
        self._bodies[name] = body

    def drop(self, name: str) -> None:
        """Forget a new rule that no other refers to."""
        del self._bodies[name]

    def bodies(self, root: str) -> dict[str, str]:
        """Return all rules with their bodies, `root` as that of the rule of this name."""
        own = {name: str(body) for name, body in self._bodies.items()}
        return {"root": root, **own, **common(self.unescaped)}

    def string(self, node: Node) -> str | None:
        """Return the rule of the JSON strings whose texts are in a language; None if it is empty."""
        inner = self.language(node, quoted=True)
        return None if inner is None else f'"\\"" {inner} "\\""'

    def language(self, node: Node, *, quoted: bool) -> str | None:
        """Return an expression for a language's texts, or for their JSON strings without quotes; None for none.

        Raises `TooLarge`.
        """
        if is_plain(node):
            return None if node == NOTHING else self._plain(node, self._quoted if quoted else chars)
        known = self._languages.get((node, quoted))
        if known is None:
            known = self._languages[node, quoted] = self._automaton(automaton(node), quoted)
        return known or None

    def repeated(self, part: str, least: int, most: int | None) -> str:
        """Return the expression of a part that is repeated, at most `most` times if it is given.

        Masks of `char{0,1000}` take 100 ms each in xgrammar 0.2 (its issues 805 and 852), those of units 4 ms.
        """
        if max(least, most or 0) <= UNROLLED:
            return f"{part}{{{least},{'' if most is None else most}}}"
        units = [(self.new(), 1)]
        self.define(units[0][0], part)
        while (size := units[-1][1] * BASE) <= max(least, most or 0):
            units.append((self.new(), size))
            self.define(units[-1][0], f"{units[-2][0]}{{{BASE}}}")
        exact, rest = list[str](), least
        for name, size in reversed(units):
            count, rest = divmod(rest, size)
            exact += [f"{name}{{{count}}}"] if count else []
        more = f"{units[0][0]}*" if most is None else _at_most(units, most - least)
        return f"({' '.join([*exact, more])})"

    def _plain(self, node: Node, write: Callable[[Ranges], str]) -> str:
        """Return a language that needs no automaton."""
        match node:
            case Chars():
                return write(node.ranges)
            case Cat():
                return f"{self._plain(node.first, write)} {self._plain(node.rest, write)}"
            case Repeat() if node.most == 0:
                return '""'
            case Repeat():
                # A repetition of what may be empty has the same texts with a least count of 0.
                least = 0 if nullable(node.node) else node.least
                return self.repeated(f"({self._plain(node.node, write)})", least, node.most)
            case Alt():
                return f"({' | '.join(sorted(self._plain(one, write) for one in node.nodes))})"
            case _:
                raise AssertionError("an automaton is needed")

    def _automaton(self, found: Automaton, quoted: bool) -> str:
        """Return the first state's rule: each state is one, of a character and the next state."""
        names = [self.new() for _ in found.steps]
        write = self._quoted if quoted else chars
        for name, place, steps in zip(names, range(len(names)), found.steps, strict=True):
            parts = ['""'] if place in found.accepting else []
            self.define(name, " | ".join([*parts, *(f"{write(ranges)} {names[to]}" for ranges, to in steps)]))
        return names[0] if names else ""

    def value(self, data: Any) -> str:
        """Return the expression of one JSON value."""
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        for character in self._escaping:  # JSON's own marks do not use it
            text = text.replace(character, f"\\u{ord(character):04x}")
        return quote(text)

    def _quoted(self, ranges: Ranges) -> str:
        """Return a set of characters as they stand in a JSON string."""
        plain = within(ranges, self.unescaped)
        parts = [chars(plain)] if plain else []
        for low, high in within(ranges, self._escaped):
            for character in map(chr, range(low, high + 1)):
                parts.append(quote(SHORT_ESCAPES.get(character, f"\\u{ord(character):04x}")))
        return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def _at_most(units: Sequence[tuple[str, int]], most: int) -> str:
    """Return the expression of up to so many of the smallest unit; each unit has a rule and a size."""
    if not units:
        return '""'
    name, size = units[-1]
    count, rest = divmod(most, size)
    tail = _at_most(units[:-1], rest)
    if rest == size - 1:
        return f"{name}{{0,{count}}} {tail}"
    if not count:
        return tail
    fewer = f"{name}{{0,{count - 1}}} {_at_most(units[:-1], size - 1)}"
    return f"({fewer} | {name}{{{count}}} {tail})"


def quote(text: str) -> str:
    """Return a text as a string of EBNF; what is not plain is written as a code point."""
    plain = [c.isascii() and c.isprintable() and c not in '"\\' for c in text]
    return '"' + "".join(c if p else f"\\U{ord(c):08x}" for c, p in zip(text, plain, strict=True)) + '"'


def value(data: Any) -> str:
    """Return the expression of one JSON value."""
    return quote(json.dumps(data, ensure_ascii=False, separators=(",", ":")))


def chars(ranges: Ranges) -> str:
    """Return a set of characters."""
    return "[" + "".join(_range(low, high) for low, high in ranges) + "]"


def _range(low: int, high: int) -> str:
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"


def _code(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\U{code:08x}"


def common(unescaped: Ranges) -> dict[str, str]:
    """Return the rules of any JSON, with the characters that stand for themselves in its strings."""
    plain = chars(unescaped)
    return COMMON | {
        "char": f'{plain} | "\\\\" (["\\\\/bfnrt] | unicode)',
        # Without escapes, so that no two spellings are one name.
        "name": f'"\\"" {plain}* "\\""',
    }


COMMON = {
    "ws": f"[ \\n\\t]{{0,{WHITESPACE}}}",
    "comma": 'ws "," ws',
    "colon": 'ws ":" ws',
    "hex": "[0-9a-fA-F]",
    # A lone UTF-16 surrogate is not a character.
    "unicode": '"u" ([0-9a-cA-CeEfF] hex hex hex | [dD] [0-7] hex hex '
    '| [dD] [89abAB] hex hex "\\\\u" [dD] [c-fC-F] hex hex)',
    "string": '"\\"" char* "\\""',
    "value": 'object | array | string | number | "true" | "false" | "null"',
    "object": '"{" ws (name colon value (comma name colon value)* ws)? "}"',
    "array": '"[" ws (value (comma value)* ws)? "]"',
    # Bounded, so that every number is finite, and none is written for ever.
    "number": 'integer ("." [0-9]{1,40})? ([eE] [+-]? [0-9]{1,2})?',
    "integer": '"0" | "-"? [1-9] [0-9]{0,39}',
}
