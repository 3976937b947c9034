"""Arrays that satisfy an alternative of a schema, as expressions of a grammar."""

from __future__ import annotations

from torchwright.serve.grammar.schema.expand import IN_PLACE, Alternative
from torchwright.serve.grammar.schema.parts import SchemaAssertion, SchemaRefused
from torchwright.serve.grammar.schema.scalars import count
from torchwright.serve.grammar.schema.writer import Writer

PLACES = 64
"""Places at which an item of `contains` is written, where the number of items has bounds."""


def array(writer: Writer, one: Alternative, types: frozenset[str]) -> str | None:
    """Return the arrays that satisfy an alternative."""
    if any(isinstance(item, list) for item in one.banned):
        raise SchemaRefused(one.parts[0].path, "arrays cannot be excluded by value")
    least = max((count(part, "minItems") for part, _ in one.given("minItems")), default=0)
    most = min((count(part, "maxItems") for part, _ in one.given("maxItems")), default=None)
    first = [[part for found in one.parts if (part := _item(found, place))] for place in range(_prefix(one))]
    rest = [part for found in one.parts if (part := _item(found, None))]
    if first and not rest and not any("items" in part.schema for part in one.parts) and least <= len(first):
        # Listed items and nothing about others: no others.
        most = len(first) if most is None else min(most, len(first))
    items: list[str] = []
    for parts in first[:most]:
        name = writer.node(parts)
        if name is None:
            most = len(items)
            break
        items.append(name)
    others = None if most is not None and most <= len(items) else writer.node(rest)
    most = most if others is not None else len(items)
    if most is not None and least > most:
        return None
    _check_unique(one, most)
    if hits := [part for part, _ in one.given("contains") if _least(part)]:
        return _containing(writer, one, hits, least, most, rest if not first else None)
    return f'"[" ws {_sequence(items, others, least, most)} "]"'


def _sequence(items: list[str], others: str | None, least: int, most: int | None) -> str:
    """Return the first items, then others, with a comma between any two."""
    tail = ""
    if others is not None:
        low, high = max(least - len(items), 0), "" if most is None else most - len(items)
        if not items:
            high = high if high == "" else high - 1
            tail = f"{others} (comma {others}){{{max(low - 1, 0)},{high}}}"
            return f"{tail} ws" if least else f"({tail} ws)?"
        tail = f"(comma {others}){{{low},{high}}}"
    for place in range(len(items) - 1, -1, -1):
        tail = f"{'comma ' if place else ''}{items[place]} {tail}"
        if place >= least:
            tail = f"({tail}{'' if place else ' ws'})?"
    if not items:
        return '""'
    return f"{tail} ws" if least else tail


def _containing(
    writer: Writer,
    one: Alternative,
    hits: list[SchemaAssertion],
    least: int,
    most: int | None,
    rest: list[SchemaAssertion] | None,
) -> str | None:
    """Return arrays of which some item satisfies `contains`: it is written at each place that it may have."""
    part = hits[0]
    if len(hits) > 1 or rest is None or _least(part) > 1 or "maxContains" in part.schema:
        reason = "one item is enforced, without minContains, maxContains, prefixItems or another contains"
        raise SchemaRefused(part.at("contains"), reason)
    hit, item = writer.node([*rest, part.inner("contains")]), writer.node(rest)
    if hit is None or item is None or most == 0:
        return None
    if most is None and least <= 1:
        return f'"[" ws ({item} comma)* {hit} (comma {item})* ws "]"'
    if (most or least) > PLACES:
        raise SchemaRefused(part.at("contains"), f"with minItems or maxItems over {PLACES}")
    found = []
    for place in range(most or least):
        after = f"{max(least - 1 - place, 0)},{'' if most is None else most - 1 - place}"
        found.append(f"({item} comma){{{place}}} {hit} (comma {item}){{{after}}}")
    if most is None:
        found.append(f"({item} comma){{{least},}} {hit} (comma {item})*")
    return f'"[" ws ({" | ".join(found)}) ws "]"'


def _least(part: SchemaAssertion) -> int:
    return count(part, "minContains") if "minContains" in part.schema else 1


def _check_unique(one: Alternative, most: int | None) -> None:
    for part, unique in one.given("uniqueItems"):
        if unique is not False and (most is None or most > 1):
            raise SchemaRefused(part.at("uniqueItems"), "it cannot be enforced for more than one item")


def _prefix(one: Alternative) -> int:
    """Return how many items have schemas of their own."""
    return max((len(_listed(part)) for part in one.parts), default=0)


def _listed(part: SchemaAssertion) -> list[object]:
    """Return `prefixItems`, or a list of `items` as older drafts have it."""
    keyword = "prefixItems" if "prefixItems" in part.schema else "items"
    found = part.schema.get(keyword, [])
    if keyword == "prefixItems" and not isinstance(found, list):
        raise SchemaRefused(part.at(keyword), "it is not a list")
    return found if isinstance(found, list) else []


def _item(part: SchemaAssertion, place: int | None) -> SchemaAssertion | None:
    """Return what a part says of the item at a place, or of those after the listed ones."""
    schema, listed = part.schema, _listed(part)
    old = isinstance(schema.get("items"), list)
    if place is not None and place < len(listed):
        return part.inner("items" if old and "prefixItems" not in schema else "prefixItems", place)
    keyword = "additionalItems" if old else "items"
    if keyword in schema:
        return part.inner(keyword)
    if schema.get("unevaluatedItems", True) is not True:
        if any(word in schema for word in (*IN_PLACE, "contains")):
            raise SchemaRefused(
                part.at("unevaluatedItems"), "it is not enforced next to other schemas; use items"
            )
        return part.inner("unevaluatedItems")
    return None
