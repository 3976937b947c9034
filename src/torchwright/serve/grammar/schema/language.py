"""Regular languages over code points: built from nodes, combined by and, or and not, made into automata.

Derivatives give the automaton (Brzozowski 1964): the derivative of a language by a character is what may follow it.
Building blocks are frozen, and the functions `cat`, `alt`, `both`, `repeat` and `negate` keep them small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]
"""Inclusive ranges of code points, sorted and apart."""
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""Halves of UTF-16 pairs, which no text in UTF-8 has."""
STATES = 1500
"""States of an automaton at most: a grammar of more takes longer to compile than a request may wait."""


class TooLarge(Exception):
    """A language whose automaton has more than `STATES` states."""


@dataclass(frozen=True)
class Chars:
    """Texts of one character from a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Cat:
    """A text of the first language, then one of the second."""

    first: Node
    rest: Node


@dataclass(frozen=True)
class Repeat:
    """`least` to `most` texts of a language; unbounded if `most` is None."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Alt:
    """Texts of any of the languages."""

    nodes: frozenset[Node]


@dataclass(frozen=True)
class Both:
    """Texts of all of the languages."""

    nodes: frozenset[Node]


@dataclass(frozen=True)
class Not:
    """Texts that are not of the language."""

    node: Node


Node = Chars | Cat | Repeat | Alt | Both | Not
NOTHING = Chars(())
EMPTY_TEXT = Repeat(NOTHING, 0, 0)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges and join those that touch."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def complement(ranges: Ranges) -> Ranges:
    """Return every other code point, but for surrogates."""
    found, low = [], 0
    for first, last in union([*ranges, SURROGATES]):
        if low < first:
            found.append((low, first - 1))
        low = last + 1
    return tuple([*found, (low, LAST)] if low <= LAST else found)


def within(ranges: Ranges, other: Ranges) -> Ranges:
    """Return the code points that both have."""
    pairs = ((max(a, c), min(b, d)) for a, b in ranges for c, d in other)
    return union((low, high) for low, high in pairs if low <= high)


ANY = Chars(complement(()))
ANYTHING = Repeat(ANY, 0, None)


def literal(text: str) -> Node:
    """Return the language of one text."""
    return cat(*(Chars(((ord(character), ord(character)),)) for character in text))


def cat(*nodes: Node) -> Node:
    """Return the language of texts of each language in turn."""
    found: Node = EMPTY_TEXT
    for node in reversed(nodes):
        if NOTHING in (node, found):
            return NOTHING
        if found == EMPTY_TEXT:
            found = node
        elif isinstance(node, Cat):
            found = Cat(node.first, cat(node.rest, found))
        elif node != EMPTY_TEXT:
            found = Cat(node, found)
    return found


def alt(*nodes: Node) -> Node:
    """Return the language of texts of any of the languages."""
    flat = {one for node in nodes for one in (node.nodes if isinstance(node, Alt) else (node,))}
    if ANYTHING in flat or Not(NOTHING) in flat:
        return ANYTHING
    ranges = union(pair for node in flat if isinstance(node, Chars) for pair in node.ranges)
    flat = {node for node in flat if not isinstance(node, Chars)} | ({Chars(ranges)} if ranges else set())
    if len(flat) > 1 and EMPTY_TEXT in flat and any(one != EMPTY_TEXT and nullable(one) for one in flat):
        flat.remove(EMPTY_TEXT)
    return Alt(frozenset(flat)) if len(flat) > 1 else next(iter(flat), NOTHING)


def both(*nodes: Node) -> Node:
    """Return the language of texts of all of the languages."""
    flat = {one for node in nodes for one in (node.nodes if isinstance(node, Both) else (node,))}
    flat -= {ANYTHING, Not(NOTHING)}
    if NOTHING in flat:
        return NOTHING
    return Both(frozenset(flat)) if len(flat) > 1 else next(iter(flat), ANYTHING)


def repeat(node: Node, least: int, most: int | None) -> Node:
    """Return the language of `least` to `most` texts of a language."""
    if most == 0 or node == EMPTY_TEXT or (node == NOTHING and not least):
        return EMPTY_TEXT
    if node == NOTHING or (least == 1 and most == 1):
        return node
    if isinstance(node, Repeat) and (node.least, node.most) == (0, None):
        return node
    return Repeat(node, least, most)


def negate(node: Node) -> Node:
    """Return the language of all other texts."""
    return node.node if isinstance(node, Not) else Not(node)


def nullable(node: Node) -> bool:
    """Check whether the empty text is in the language."""
    match node:
        case Chars():
            return False
        case Cat():
            return nullable(node.first) and nullable(node.rest)
        case Repeat():
            return not node.least or nullable(node.node)
        case Alt():
            return any(map(nullable, node.nodes))
        case Both():
            return all(map(nullable, node.nodes))
        case Not():
            return not nullable(node.node)


def derivative(node: Node, character: int) -> Node:
    """Return the language of what may follow a character."""
    match node:
        case Chars():
            return EMPTY_TEXT if any(low <= character <= high for low, high in node.ranges) else NOTHING
        case Cat():
            first = cat(derivative(node.first, character), node.rest)
            return alt(first, derivative(node.rest, character)) if nullable(node.first) else first
        case Repeat():
            most = None if node.most is None else node.most - 1
            rest = repeat(node.node, max(0, node.least - 1), most)
            return cat(derivative(node.node, character), rest)
        case Alt():
            return alt(*(derivative(one, character) for one in node.nodes))
        case Both():
            return both(*(derivative(one, character) for one in node.nodes))
        case Not():
            return negate(derivative(node.node, character))


def _bounds(node: Node) -> set[int]:
    """Return the first code points of the ranges that distinguish a first character."""
    match node:
        case Chars():
            return {bound for low, high in node.ranges for bound in (low, high + 1)}
        case Cat():
            return _bounds(node.first) | (_bounds(node.rest) if nullable(node.first) else set())
        case Repeat() | Not():
            return _bounds(node.node)
        case Alt() | Both():
            return set[int]().union(*map(_bounds, node.nodes))


def is_plain(node: Node) -> bool:
    """Check whether the language can be written without an automaton: no and, no not."""
    match node:
        case Chars():
            return True
        case Cat():
            return is_plain(node.first) and is_plain(node.rest)
        case Repeat():
            return is_plain(node.node)
        case Alt():
            return all(map(is_plain, node.nodes))
        case Both() | Not():
            return False


@dataclass(frozen=True)
class Automaton:
    """States from which a text can still be accepted; 0 is the first, if there is any."""

    steps: tuple[tuple[tuple[Ranges, int], ...], ...]
    """State → (characters, next state)."""
    accepting: frozenset[int]


def automaton(node: Node) -> Automaton:
    """Return the language's automaton without dead states. Raises `TooLarge`."""
    places, steps, waiting = {node: 0}, list[dict[int, list[tuple[int, int]]]](), [node]
    while waiting:
        state = waiting.pop(0)
        found: dict[int, list[tuple[int, int]]] = {}
        bounds = sorted({0, *_bounds(state)} - {LAST + 1})
        for low, high in zip(bounds, [*(b - 1 for b in bounds[1:]), LAST], strict=True):
            ranges = within(((low, high),), ANY.ranges)
            following = derivative(state, ranges[0][0]) if ranges else NOTHING
            if following == NOTHING:
                continue
            if following not in places:
                if len(places) >= STATES:
                    raise TooLarge
                places[following] = len(places)
                waiting.append(following)
            found.setdefault(places[following], []).extend(ranges)
        steps.append(found)
    accepting = {place for state, place in places.items() if nullable(state)}
    return _without_dead(steps, accepting)


def _without_dead(steps: list[dict[int, list[tuple[int, int]]]], accepting: set[int]) -> Automaton:
    sources: dict[int, set[int]] = {}
    for place, found in enumerate(steps):
        for following in found:
            sources.setdefault(following, set()).add(place)
    live, waiting = set(accepting), list(accepting)
    while waiting:
        for source in sources.get(waiting.pop(), set()) - live:
            live.add(source)
            waiting.append(source)
    if 0 not in live:
        return Automaton((), frozenset())
    names = {place: name for name, place in enumerate(sorted(live))}
    kept = tuple(
        tuple((union(ranges), names[to]) for to, ranges in steps[place].items() if to in live)
        for place in sorted(live)
    )
    return Automaton(kept, frozenset(names[place] for place in accepting))


def matches(node: Node, text: str) -> bool:
    """Check whether a text is in the language."""
    for character in text:
        node = derivative(node, ord(character))
        if node == NOTHING:
            return False
    return nullable(node)


def lengths(node: Node) -> tuple[int, int | None]:
    """Return bounds of the texts' lengths, perhaps wider than necessary; None means unbounded."""
    match node:
        case Chars():
            return 1, 1
        case Cat():
            (a, b), (c, d) = lengths(node.first), lengths(node.rest)
            return a + c, None if b is None or d is None else b + d
        case Repeat():
            a, b = lengths(node.node)
            return a * node.least, None if b is None or node.most is None else b * node.most
        case Alt():
            found = [lengths(one) for one in node.nodes]
            most = [high for _, high in found if high is not None]
            return min(low for low, _ in found), max(most) if len(most) == len(found) else None
        case Both():
            found = [lengths(one) for one in node.nodes]
            most = [high for _, high in found if high is not None]
            return max(low for low, _ in found), min(most) if most else None
        case Not():
            return 0, None


def letters(node: Node) -> Ranges:
    """Return the characters of a language's texts, perhaps more than there are."""
    match node:
        case Chars():
            return node.ranges
        case Cat():
            return union([*letters(node.first), *letters(node.rest)])
        case Repeat():
            return letters(node.node)
        case Alt():
            return union(pair for one in node.nodes for pair in letters(one))
        case Both():
            return _common(map(letters, node.nodes))
        case Not():
            return ANY.ranges


def edge(node: Node, *, last: bool) -> Ranges:
    """Return the first or the last characters of a language's texts, perhaps more than there are."""
    match node:
        case Chars():
            return node.ranges
        case Cat():
            outer, inner = (node.rest, node.first) if last else (node.first, node.rest)
            found = edge(outer, last=last)
            return union([*found, *edge(inner, last=last)]) if nullable(outer) else found
        case Repeat():
            return edge(node.node, last=last)
        case Alt():
            return union(pair for one in node.nodes for pair in edge(one, last=last))
        case Both():
            return _common(edge(one, last=last) for one in node.nodes)
        case Not():
            return ANY.ranges


def _common(sets: Iterable[Ranges]) -> Ranges:
    found = ANY.ranges
    for ranges in sets:
        found = within(found, ranges)
    return found


def clipped(node: Node, least: int, most: int | None) -> Node | None:
    """Return the texts whose lengths are within bounds, where counting one repetition is enough; None elsewhere."""
    if isinstance(node, Alt):
        branches = [clipped(one, least, most) for one in node.nodes]
        return None if None in branches else alt(*(one for one in branches if one is not None))
    parts = list[Node]()
    while isinstance(node, Cat):
        parts.append(node.first)
        node = node.rest
    parts.append(node)
    found = [lengths(part) for part in parts]
    places = [place for place, (low, high) in enumerate(found) if low != high]
    if len(places) != 1:
        return None
    varying = parts[places[0]]
    if not isinstance(varying, Repeat) or not isinstance(varying.node, Chars):
        return None
    fixed = sum(low for place, (low, _) in enumerate(found) if place != places[0])
    bounds = [bound for bound in (varying.most, None if most is None else most - fixed) if bound is not None]
    low, high = max(varying.least, least - fixed), min(bounds, default=None)
    if high is not None and high < low:
        return NOTHING
    return cat(*parts[: places[0]], repeat(varying.node, low, high), *parts[places[0] + 1 :])
