"""Numbers between bounds, as languages of the texts that JSON writes them by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from torchwright.serve.grammar.schema.language import (
    EMPTY_TEXT,
    NOTHING,
    Chars,
    Node,
    alt,
    both,
    cat,
    literal,
    repeat,
)

DIGITS = 40
"""Digits before the point at most, as in the rule `number`."""
EXACT = 15
"""Significant digits by which two decimal numbers are two doubles, too."""
DIGIT = Chars(((0x30, 0x39),))
NONZERO = Chars(((0x31, 0x39),))
WHOLE = alt(literal("0"), cat(NONZERO, repeat(DIGIT, 0, DIGITS - 1)))
FRACTIONS = cat(
    repeat(literal("-"), 0, 1), WHOLE, literal("."), repeat(DIGIT, 0, None), NONZERO, repeat(DIGIT, 0, None)
)
"""Numbers that are not integers."""


@dataclass(frozen=True)
class Bounds:
    """The numbers from `low` to `high`, each with its end or without."""

    low: Decimal | None = None
    low_open: bool = False
    high: Decimal | None = None
    high_open: bool = False

    def tightened(self, other: Bounds) -> Bounds:
        """Return the numbers that both have."""
        low, low_open = _tighter((self.low, self.low_open), (other.low, other.low_open), 1)
        high, high_open = _tighter((self.high, self.high_open), (other.high, other.high_open), -1)
        return Bounds(low, low_open, high, high_open)

    def integers(self) -> tuple[int | None, int | None]:
        """Return the first and the last integer."""
        low = None if self.low is None else math.ceil(self.low)
        high = None if self.high is None else math.floor(self.high)
        low = low + 1 if low is not None and self.low_open and low == self.low else low
        high = high - 1 if high is not None and self.high_open and high == self.high else high
        return low, high


def _tighter(
    one: tuple[Decimal | None, bool], two: tuple[Decimal | None, bool], sign: int
) -> tuple[Decimal | None, bool]:
    given = [(sign * bound, open, bound) for bound, open in (one, two) if bound is not None]
    if not given:
        return None, False
    _, open, bound = max(given)
    return bound, open


def integers(low: int | None, high: int | None) -> Node:
    """Return the integers of a range."""
    return decimals(
        Bounds(None if low is None else Decimal(low), False, None if high is None else Decimal(high)), 0
    )


def decimals(bounds: Bounds, most: int | None = None) -> Node:
    """Return the numbers between bounds without exponents, with so many digits after the point at most.

    Few enough digits by default that no number is rounded to one that is out of bounds. Raises `ValueError` where
    that cannot be had.
    """
    if most is None:
        given = [bound for bound in (bounds.low, bounds.high) if bound is not None]
        before = max((len(str(abs(int(bound)))) for bound in given), default=1)
        needed = max((len(_fraction(bound)) for bound in given), default=0)
        most = max(0, EXACT - before, needed)
        if most > EXACT - before and most and (bounds.low_open or bounds.high_open):
            raise ValueError("an exclusive bound next to one of too many digits")
    parts = []
    if bounds.low is not None:
        parts.append(_beyond(bounds.low, bounds.low_open, most, below=False))
    if bounds.high is not None:
        parts.append(_beyond(bounds.high, bounds.high_open, most, below=True))
    if not parts:
        return alt(_signed(_after(WHOLE, most), below=False), _signed(_after(WHOLE, most), below=True))
    return both(*parts)


def _beyond(bound: Decimal, open: bool, most: int, *, below: bool) -> Node:
    """Return the numbers on one side of a bound: above it, or `below`."""
    if bound == 0 and not open and not below:
        return _after(WHOLE, most)
    outward = bound > 0 if below else bound < 0
    size = abs(bound)
    if outward:
        # Everything on the other side of 0, and what is nearer to it than the bound.
        return alt(
            _signed(_after(WHOLE, most), below=below),
            _signed(_nearer(size, open, most), below=not below),
        )
    return _signed(_above(size, open, most), below=below)


def _signed(node: Node, *, below: bool) -> Node:
    return cat(literal("-"), node) if below else node


def _after(whole: Node, most: int) -> Node:
    """Return numbers with any fraction after their whole part."""
    return cat(whole, repeat(cat(literal("."), repeat(DIGIT, 1, most)), 0, 1)) if most else whole


def _above(size: Decimal, open: bool, most: int) -> Node:
    """Return numbers from 0 on that are at least a size, or over it."""
    whole, fraction = int(size), _fraction(size)
    same: Node = NOTHING
    if fraction:
        parts = [
            cat(
                literal(fraction[:place]),
                Chars(((ord(digit) + 1, 0x39),)),
                repeat(DIGIT, 0, most - place - 1),
            )
            for place, digit in enumerate(fraction)
            if digit < "9"
        ]
        rest = most - len(fraction)
        end = cat(repeat(DIGIT, 0, rest - 1), NONZERO) if rest > 0 else NOTHING
        parts.append(cat(literal(fraction), end if open else repeat(DIGIT, 0, rest)))
        same = cat(literal("."), alt(*parts))
    elif open:
        same = cat(literal("."), repeat(DIGIT, 0, most - 1), NONZERO) if most else NOTHING
    else:
        same = repeat(cat(literal("."), repeat(DIGIT, 1, most)), 0, 1) if most else EMPTY_TEXT
    return alt(cat(literal(str(whole)), same), _after(_longer(whole + 1), most))


def _longer(least: int) -> Node:
    """Return whole numbers from `least` on, which is 1 or more."""
    text = str(least)
    parts = [
        cat(literal(text[:place]), Chars(((ord(digit) + 1, 0x39),)), repeat(DIGIT, rest, rest))
        for place, digit in enumerate(text)
        if digit < "9"
        for rest in [len(text) - place - 1]
    ]
    longer = cat(NONZERO, repeat(DIGIT, len(text), DIGITS - 1)) if len(text) < DIGITS else NOTHING
    return alt(literal(text), *parts, longer)


def _nearer(size: Decimal, open: bool, most: int) -> Node:
    """Return numbers from 0 on that are at most a size, or under it."""
    whole, fraction = int(size), _fraction(size)
    parts = [_after(_shorter(whole), most)]
    if fraction or not open:
        parts.append(literal(str(whole)))
    if most:
        zeros = repeat(literal("0"), 1, most)
        under = [
            cat(
                literal(fraction[:place]),
                Chars(((0x30, ord(digit) - 1),)),
                repeat(DIGIT, 0, most - place - 1),
            )
            for place, digit in enumerate(fraction)
            if digit > "0"
        ]
        under += [literal(fraction[:place]) for place in range(1, len(fraction))]
        if not open:
            under.append(
                cat(literal(fraction), repeat(literal("0"), 0, most - len(fraction))) if fraction else zeros
            )
        parts.append(cat(literal(str(whole)), literal("."), alt(*under)))
    return alt(*parts)


def _shorter(above: int) -> Node:
    """Return whole numbers under a number."""
    text = str(above)
    parts = [
        cat(literal(text[:place]), Chars(((first, ord(digit) - 1),)), repeat(DIGIT, rest, rest))
        for place, digit in enumerate(text)
        for first in [0x31 if place == 0 else 0x30]
        for rest in [len(text) - place - 1]
        if ord(digit) > first
    ]
    shorter = cat(NONZERO, repeat(DIGIT, 0, len(text) - 2)) if len(text) > 1 else NOTHING
    return alt(literal("0") if above else NOTHING, *parts, shorter)


def _fraction(bound: Decimal) -> str:
    """Return the digits after the point, without zeros at the end."""
    text = f"{abs(bound):f}"
    return text.partition(".")[2].rstrip("0")
