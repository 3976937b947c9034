"""Strings and numbers that satisfy an alternative of a schema, as expressions of a grammar."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from torchwright.serve.grammar.schema import formats, numbers
from torchwright.serve.grammar.schema.expand import TYPES, Alternative
from torchwright.serve.grammar.schema.language import (
    ANY,
    ANYTHING,
    Node,
    alt,
    both,
    cat,
    clipped,
    lengths,
    literal,
    matches,
    negate,
    repeat,
)
from torchwright.serve.grammar.schema.parts import SchemaAssertion, SchemaRefused
from torchwright.serve.grammar.schema.pattern import PatternRefused, search
from torchwright.serve.grammar.schema.rules import GrammarRules, value
from torchwright.serve.grammar.schema.writer import Writer

LITERALS = 2000
"""Multiples of a number between bounds at most."""
REMAINDERS = 500
"""Largest number whose multiples without bounds are written: a rule for each remainder."""


def text(writer: Writer, one: Alternative, types: frozenset[str]) -> str | None:
    """Return the strings that satisfy an alternative."""
    language, (least, most) = _language(one)
    if language == ANYTHING:
        if most is not None and most < least:
            return None
        if (least, most) == (0, None):
            return "string"
        return f'"\\"" {writer.rules.repeated("char", least, most)} "\\""'
    return writer.rules.string(_bounded(language, least, most))


def texts(one: Alternative) -> Node:
    """Return the language of the strings that satisfy an alternative."""
    language, (least, most) = _language(one)
    found = _bounded(language, least, most)
    if one.values is None:
        return found
    return alt(*(literal(item) for item in one.values if isinstance(item, str) and matches(found, item)))


def _bounded(language: Node, least: int, most: int | None) -> Node:
    """Return the texts of a language whose lengths are within bounds."""
    low, high = lengths(language)
    if low >= least and (most is None or (high is not None and high <= most)):
        return language
    short = clipped(language, least, most)
    return both(language, repeat(ANY, least, most)) if short is None else short


def _language(one: Alternative) -> tuple[Node, tuple[int, int | None]]:
    """Return the language of patterns, formats and banned strings, and the bounds of the length."""
    found = [negate(literal(item)) for item in one.banned if isinstance(item, str)]
    least, most = 0, None
    for part in one.parts:
        schema = part.schema
        if "minLength" in schema:
            least = max(least, count(part, "minLength"))
        if "maxLength" in schema:
            length = count(part, "maxLength")
            most = length if most is None else min(length, most)
        if "pattern" in schema:
            found.append(pattern(schema["pattern"], part.at("pattern")))
        banned = schema.get("not")
        if isinstance(banned, dict) and part.path.endswith("/pattern/not"):
            found.append(negate(pattern(banned["pattern"], part.path, outer=True)))
    for _, name in one.given("format"):
        if (known := formats.language(str(name), most)) is not None:
            found.append(known)
    return both(*found), (least, most)


def pattern(regex: Any, path: str, *, outer: bool = False) -> Node:
    """Return the language of a pattern. Raises `SchemaRefused`."""
    if not isinstance(regex, str):
        raise SchemaRefused(path, "it is not a string")
    try:
        return search(regex, outer=outer)
    except PatternRefused as error:
        raise SchemaRefused(path, f"{error} is not supported") from None


def number(writer: Writer, one: Alternative, types: frozenset[str]) -> str | None:
    """Return the numbers that satisfy an alternative; `types` says whether they are integers, fractions or both."""
    bounds, rules = _bounds(one), writer.rules
    multiples = [_multiple(part) for part, _ in one.given("multipleOf")]
    if types == {"integer"} or (multiples and "integer" in types):
        low, high = bounds.integers()
        if low is not None and high is not None and low > high:
            return None
        if multiples:
            part, _ = next(one.given("multipleOf"))
            return _multiples(rules, math.lcm(*multiples), low, high, part.at("multipleOf"), one)
        if low is high is None and not one.banned:
            return "integer"
        return rules.language(both(numbers.integers(low, high), *_not_banned(one)), quoted=False)
    if multiples:
        return None
    if bounds == numbers.Bounds() and types == TYPES["number"] and not one.banned:
        return "number"
    try:
        language = both(numbers.decimals(bounds), *_not_banned(one))
    except ValueError as error:
        raise SchemaRefused(one.parts[0].path, str(error)) from None
    return rules.language(language if "integer" in types else both(language, numbers.FRACTIONS), quoted=False)


def count(part: SchemaAssertion, keyword: str) -> int:
    """Return a keyword's number of things. Raises `SchemaRefused` where it is not one."""
    given = _number(part, keyword)
    if given < 0 or given != int(given):
        raise SchemaRefused(part.at(keyword), "it is not a whole number of 0 or more")
    return int(given)


def _number(part: SchemaAssertion, keyword: str) -> int | float:
    given = part.schema[keyword]
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise SchemaRefused(part.at(keyword), "it is not a number")
    return given


def _bounds(one: Alternative) -> numbers.Bounds:
    found = numbers.Bounds()
    for part in one.parts:
        for keyword, sign, open in (
            ("minimum", 1, False),
            ("maximum", -1, False),
            ("exclusiveMinimum", 1, True),
            ("exclusiveMaximum", -1, True),
        ):
            if keyword in part.schema:
                bound = Decimal(str(_number(part, keyword)))
                other = numbers.Bounds(bound, open) if sign > 0 else numbers.Bounds(None, False, bound, open)
                found = found.tightened(other)
    return found


def _multiple(part: SchemaAssertion) -> int:
    given = _number(part, "multipleOf")
    if given <= 0:
        raise SchemaRefused(part.at("multipleOf"), "it is not over 0")
    if given != int(given):
        raise SchemaRefused(part.at("multipleOf"), "only multiples of integers are enforced")
    return int(given)


def _not_banned(one: Alternative) -> list[Node]:
    """Return, for each excluded number, the texts of all others."""
    found = []
    for item in one.banned:
        if isinstance(item, int | float) and not isinstance(item, bool):
            text = f"{Decimal(str(item)):f}"
            zeros = repeat(literal("0"), 0, None)
            whole, _, fraction = text.partition(".")
            fraction = fraction.rstrip("0")
            after = (
                cat(literal(f".{fraction}"), zeros) if fraction else repeat(cat(literal("."), zeros), 0, 1)
            )
            sign = repeat(literal("-"), 0, 1) if item == 0 else literal("")
            found.append(negate(cat(sign, literal(whole), after)))
    return found


def _multiples(
    rules: GrammarRules, of: int, low: int | None, high: int | None, path: str, one: Alternative
) -> str | None:
    """Return the multiples of an integer in a range."""
    if low is not None and high is not None:
        first = -(-low // of) * of
        if (high - first) // of >= LITERALS:
            raise SchemaRefused(path, f"more than {LITERALS} multiples between the bounds")
        found = [item for item in range(first, high + 1, of) if item not in one.banned]
        return " | ".join(map(value, found)) or None
    if of > REMAINDERS or any(not isinstance(item, str) for item in one.banned):
        raise SchemaRefused(path, f"without two bounds, only multiples of {REMAINDERS} or less are enforced")
    positive = low is None or low <= of
    negative = high is None or high >= -of
    if not (positive if low is not None else negative):
        raise SchemaRefused(path, "with a bound on one side, multiples are enforced from about 0 on")
    zero = (low is None or low <= 0) and (high is None or high >= 0)
    names = [rules.new() for _ in range(of)]
    for state, name in enumerate(names):
        steps = [f'"{digit}" {names[(state * 10 + digit) % of]}' for digit in range(10)]
        rules.define(name, " | ".join(['""', *steps] if state == 0 else steps))
    started = " | ".join(f'"{digit}" {names[digit % of]}' for digit in range(1, 10))
    parts = (['"0"'] if zero else []) + ([f"({started})"] if high is None else [])
    return " | ".join(parts + ([f'"-" ({started})'] if low is None else []))
