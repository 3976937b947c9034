"""Regular expressions of JSON schemas: from the pattern's text to the language of whole texts that it is found in.

ECMA-262 is what the specification asks for, and Python's `re` is what validates most answers; where the two differ
(what \\d, \\w, \\s and the dot stand for) the language is inside of both. `outer` gives one around both instead, whose
complement is safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torchwright.serve.grammar.schema.language import (
    ANY,
    ANYTHING,
    EMPTY_TEXT,
    LAST,
    Chars,
    Node,
    Ranges,
    alt,
    both,
    cat,
    complement,
    negate,
    repeat,
    union,
    within,
)

REPEATS = 1000
"""Repetitions of a part of a pattern at most."""
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
ALL_SPACE: Ranges = (
    *((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
CONTROL = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}
QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class PatternRefused(Exception):
    """A pattern that is not understood; the text says which part."""


@dataclass(frozen=True)
class _Anchor:
    """The beginning or the end of the text."""

    end: bool


@dataclass(frozen=True)
class _Look:
    """Lookahead: text that must, or must not, follow here."""

    branches: list[_Sequence]
    wanted: bool


@dataclass(frozen=True)
class _Group:
    branches: list[_Sequence]


_Item = Node | _Anchor | _Look | _Group
_Sequence = list[_Item]


def search(pattern: str, *, outer: bool = False) -> Node:
    """Return the language of texts in which the pattern is found. Raises `PatternRefused`."""
    branches = _Reader(pattern, outer).read()
    return alt(*(_whole(branch, outer) for branch in branches))


def whole(pattern: str) -> Node:
    """Return the language of texts that match the whole pattern."""
    return search(f"^(?:{pattern})$")


def _whole(branch: _Sequence, outer: bool) -> Node:
    """Return the texts in which one alternative is found: it may begin and end anywhere but at anchors."""
    if len(branch) == 1 and isinstance(branch[0], _Group):
        return alt(*(_whole(inner, outer) for inner in branch[0].branches))
    if branch and branch[0] == _Anchor(end=False):
        return _rest(branch[1:], outer, at_start=True)
    return cat(ANYTHING, _rest(branch, outer))


def _rest(items: _Sequence, outer: bool, *, at_start: bool = False) -> Node:
    """Return what may stand from here to the end of the text."""
    if not items:
        return ANYTHING
    head, rest = items[0], items[1:]
    if head == _Anchor(end=True) and not rest:
        # Python takes `$` before a line feed at the end, too.
        return repeat(Chars(((0x0A, 0x0A),)), 0, 1) if outer else EMPTY_TEXT
    if isinstance(head, _Anchor):
        if at_start and not head.end:
            return _rest(rest, outer, at_start=True)
        raise PatternRefused("'^' or '$' inside of the pattern")
    if isinstance(head, _Look):
        seen = alt(*(_rest(branch, outer == head.wanted, at_start=at_start) for branch in head.branches))
        return both(seen if head.wanted else negate(seen), _rest(rest, outer, at_start=at_start))
    if isinstance(head, _Group) and not rest and any(_has_anchor(branch) for branch in head.branches):
        return alt(*(_rest(branch, outer, at_start=at_start) for branch in head.branches))
    return cat(_plain(head), _rest(rest, outer))


def _has_anchor(branch: _Sequence) -> bool:
    return any(isinstance(item, _Anchor | _Look) for item in branch)


def _plain(item: _Item) -> Node:
    """Return the language of an item in which nothing looks around."""
    if isinstance(item, _Group):
        return alt(*(cat(*map(_plain, branch)) for branch in item.branches))
    if isinstance(item, _Anchor):
        raise PatternRefused("'^' or '$' inside of the pattern")
    if isinstance(item, _Look):
        raise PatternRefused("a lookahead inside of a group")
    return item


class _Reader:
    """Reads one pattern."""

    def __init__(self, pattern: str, outer: bool) -> None:
        self._text, self._at, self._outer = pattern, 0, outer

    def read(self) -> list[_Sequence]:
        branches = self._branches()
        if self._at < len(self._text):
            raise PatternRefused("')' without '('")
        return branches

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, count: int = 1) -> str:
        found = self._text[self._at : self._at + count]
        if len(found) < count:
            raise PatternRefused("it ends too early")
        self._at += count
        return found

    def _takes(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _branches(self) -> list[_Sequence]:
        branches: list[_Sequence] = [[]]
        while self._peek() not in ("", ")"):
            if self._takes("|"):
                branches.append([])
            else:
                branches[-1].append(self._quantified(self._item()))
        return branches

    def _item(self) -> _Item:
        character = self._take()
        if character in "^$":
            return _Anchor(end=character == "$")
        if character == "(":
            return self._group()
        if character == "[":
            return Chars(self._set())
        if character == ".":
            return ANY if self._outer else Chars(complement(LINE_ENDS))
        if character == "\\":
            return Chars(within(self._escape(inside=False), ANY.ranges))
        if character in "*+?" or (character == "{" and self._text[self._at : self._at + 1].isdigit()):
            raise PatternRefused(f"'{character}' repeats nothing")
        return Chars(((ord(character), ord(character)),))

    def _group(self) -> _Item:
        outer = self._outer
        look = self._takes("?=") or (self._takes("?!") and None)
        if look is None:
            self._outer = not outer
        elif not look and self._takes("?") and not self._takes(":"):
            self._name()
        branches = self._branches()
        self._outer = outer
        if not self._takes(")"):
            raise PatternRefused("'(' without ')'")
        return _Group(branches) if look is False else _Look(branches, wanted=bool(look))

    def _name(self) -> None:
        if not (self._takes("<") or self._takes("P<")) or self._peek() in ("=", "!", ""):
            raise PatternRefused(f"'(?{self._peek()}'")
        name = ""
        while not self._takes(">"):
            name += self._take()
        if not name.isidentifier():
            raise PatternRefused(f"the group's name '{name}'")

    def _quantified(self, item: _Item) -> _Item:
        character = self._peek()
        if character in QUANTIFIERS and character:
            self._take()
            least, most = QUANTIFIERS[character]
        elif (bounds := self._braces()) is not None:
            least, most = bounds
        else:
            return item
        self._takes("?")  # lazy or greedy, the texts are the same
        if self._peek() and self._peek() in "*+?":
            raise PatternRefused("two repetitions of one part")
        if isinstance(item, _Group) and (least, most) == (1, 1):
            return item
        return repeat(_plain(item), least, most)

    def _braces(self) -> tuple[int, int | None] | None:
        end = self._text.find("}", self._at)
        if self._peek() != "{" or end < 0:
            return None
        least, comma, most = self._text[self._at + 1 : end].partition(",")
        if not (least.isascii() and least.isdigit()) or not (not most or (most.isascii() and most.isdigit())):
            return None
        self._at = end + 1
        high = int(most) if most else None if comma else int(least)
        if max(int(least), high or 0) > REPEATS:
            raise PatternRefused(f"more than {REPEATS} repetitions")
        if high is not None and high < int(least):
            raise PatternRefused("a repetition whose bounds are the wrong way round")
        return int(least), high

    def _set(self) -> Ranges:
        negated = self._takes("^")
        if negated:
            self._outer = not self._outer
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = self._set_item()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._take()
                high = self._set_item()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                    raise PatternRefused("a range between classes")
                low = ((low[0][0], high[0][0]),)
                if low[0][0] > low[0][1]:
                    raise PatternRefused("a range whose bounds are the wrong way round")
            ranges += low
        self._take()
        if negated:
            self._outer = not self._outer
        if not ranges:
            raise PatternRefused("an empty set of characters")
        return complement(tuple(ranges)) if negated else within(union(ranges), ANY.ranges)

    def _set_item(self) -> Ranges:
        character = self._take()
        if character == "\\":
            return self._escape(inside=True)
        if character == "[" and self._peek() in (":", "[", "."):
            raise PatternRefused("a class in a set")
        return ((ord(character), ord(character)),)

    def _escape(self, *, inside: bool) -> Ranges:
        character = self._take()
        if character in _CLASSES:
            return _CLASSES[character](self._outer)
        if inside and character == "b":
            return ((0x08, 0x08),)
        if character in CONTROL and not (character == "0" and self._peek().isdigit()):
            code = CONTROL[character]
        elif character == "x":
            code = self._hexadecimal(2)
        elif character == "u":
            code = self._code_point()
        elif character == "c" and self._peek().isascii() and self._peek().isalpha():
            code = ord(self._take()) % 32
        elif character.isalnum():
            raise PatternRefused(f"'\\{character}'")
        else:
            code = ord(character)
        return ((code, code),)

    def _code_point(self) -> int:
        if self._takes("{"):
            digits = ""
            while not self._takes("}"):
                digits += self._take()
            return _hexadecimal(digits)
        code = self._hexadecimal(4)
        if 0xD800 <= code < 0xDC00 and self._takes("\\u"):
            return 0x10000 + ((code - 0xD800) << 10) + (self._hexadecimal(4) - 0xDC00)
        return code

    def _hexadecimal(self, count: int) -> int:
        return _hexadecimal(self._take(count))


def _hexadecimal(digits: str) -> int:
    try:
        code = int(digits, 16)
    except ValueError:
        raise PatternRefused(f"the hexadecimal number '{digits}'") from None
    if not 0 <= code <= LAST:
        raise PatternRefused(f"the code point '{digits}'")
    return code


@cache
def _all(test: Callable[[str], bool]) -> Ranges:
    """Return the characters of Unicode that a test of Python's takes."""
    return union((code, code) for code in range(0x80, LAST + 1) if test(chr(code)))


def _digits(outer: bool) -> Ranges:
    return union([*DIGITS, *_all(str.isdecimal)]) if outer else DIGITS


def _word(outer: bool) -> Ranges:
    return union([*WORD, *_all(str.isalnum)]) if outer else WORD


def _space(outer: bool) -> Ranges:
    return ALL_SPACE if outer else SPACE


_CLASSES: dict[str, Callable[[bool], Ranges]] = {
    "d": _digits,
    "D": lambda outer: complement(_digits(not outer)),
    "w": _word,
    # Only ASCII on the inside: Unicode's other characters make hundreds of ranges, and no pattern needs them.
    "W": lambda outer: complement(WORD) if outer else within(complement(WORD), ((0, 0x7F),)),
    "s": _space,
    "S": lambda outer: complement(_space(not outer)),
}
