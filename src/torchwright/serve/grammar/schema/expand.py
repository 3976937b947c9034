"""Schemas taken apart: what a value must satisfy, as alternatives without `anyOf`, `allOf`, `$ref`, `not` and `if`.

A value is described by parts that must all hold. `Expander.expand` gives alternatives, each of which has the types and
values that it may be, and the schemas whose other keywords hold for it. What cannot be taken apart is refused with the
path of its keyword.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from torchwright.serve.grammar.schema.parts import (
    Json,
    SchemaAssertion,
    SchemaRefused,
    escape,
    listed,
    mapping,
    names,
    schemas,
)
from torchwright.serve.grammar.schema.references import References

TYPES: dict[str, frozenset[str]] = {
    "null": frozenset({"null"}),
    "boolean": frozenset({"boolean"}),
    "string": frozenset({"string"}),
    "array": frozenset({"array"}),
    "object": frozenset({"object"}),
    "integer": frozenset({"integer"}),
    "number": frozenset({"integer", "fraction"}),
}
"""JSON Schema types → the types that this module distinguishes."""
EVERY = frozenset[str]().union(*TYPES.values())
ALTERNATIVES = 512
"""Alternatives of one value at most."""
KEYWORDS = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains",
        "minContains", "maxContains", "unevaluatedItems",
    ),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
        "unevaluatedProperties",
    ),
}  # fmt: skip
"""Type → the keywords that restrict it."""
IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies")
"""Keywords whose schemas hold for the same value."""


@dataclass(frozen=True)
class Alternative:
    """One way to satisfy a value's parts."""

    parts: tuple[SchemaAssertion, ...] = ()
    """Schemas whose keywords for the value's type hold, and which a literal value must satisfy."""
    types: frozenset[str] = EVERY
    values: tuple[Json, ...] | None = None
    """The only values, where they are counted."""
    banned: tuple[Json, ...] = ()
    """Values that it may not be."""

    def merged(self, other: Alternative) -> Alternative | None:
        """Return what satisfies both; None where nothing does."""
        values = other.values if self.values is None else self.values
        if self.values is not None and other.values is not None:
            values = tuple(value for value in self.values if any(same(value, one) for one in other.values))
        types = self.types & other.types
        if not types or (values is not None and not values):
            return None
        parts = tuple({part.path: part for part in (*self.parts, *other.parts)}.values())
        return Alternative(parts, types, values, (*self.banned, *other.banned))

    def given(self, keyword: str) -> Iterator[tuple[SchemaAssertion, Json]]:
        """Return the parts that have a keyword, and what it is."""
        for part in self.parts:
            if keyword in part.schema:
                yield part, part.schema[keyword]


class Expander:
    """Takes the parts of one schema apart."""

    def __init__(self, root: Json) -> None:
        self._references = References(root)

    def expand(self, parts: Iterable[SchemaAssertion]) -> list[Alternative]:
        """Return the alternatives of a value for which all parts hold. Raises `SchemaRefused`."""
        found = [Alternative()]
        for part in parts:
            found = _product(found, self._one(part), part.path)
        return found

    def _one(self, part: SchemaAssertion) -> list[Alternative]:
        schema = part.schema
        if isinstance(schema, bool):
            return [Alternative()] if schema == part.holds else []
        if not isinstance(schema, dict):
            raise SchemaRefused(part.path, "a schema is an object or a boolean")
        return self._positive(part) if part.holds else self._negative(part)

    def _positive(self, part: SchemaAssertion) -> list[Alternative]:
        schema = part.schema
        found = [_own(part)]
        if "$id" in schema and part.path != "#":
            raise SchemaRefused(part.at("$id"), "only the whole schema may have an $id")
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                raise SchemaRefused(part.at(keyword), "it cannot be enforced; use $ref")
        for branches in self._branches(part):
            union = [one for branch in branches for one in self.expand(branch)]
            found = _product(found, union, part.path)
        if "oneOf" in schema:
            found = _product(found, self._one_of(part), part.at("oneOf"))
        return found

    def _branches(self, part: SchemaAssertion) -> Iterator[list[list[SchemaAssertion]]]:
        """Return what holds for the same value: each is a list of alternatives, of which each has parts."""
        schema = part.schema
        if "$ref" in schema:
            yield [[self._references.resolved(part)]]
        for place in range(len(schemas(part, "allOf"))):
            yield [[part.inner("allOf", place)]]
        if "anyOf" in schema:
            yield [[part.inner("anyOf", place)] for place in range(len(schemas(part, "anyOf")))]
        if "not" in schema:
            yield [[part.inner("not")._replace(holds=False)]]
        if "if" in schema and ("then" in schema or "else" in schema):
            condition = part.inner("if")
            then = [part.inner("then")] if "then" in schema else []
            otherwise = [part.inner("else")] if "else" in schema else []
            yield [[condition, *then], [condition._replace(holds=False), *otherwise]]
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needs in mapping(part, keyword).items():
                without = part.like({"properties": {name: False}}, f"{keyword}/{escape(name)}/without")
                if isinstance(needs, list):
                    needs = {"required": [name, *needs]}
                yield [[without], [SchemaAssertion(needs, f"{part.at(keyword)}/{escape(name)}")]]

    def _one_of(self, part: SchemaAssertion) -> list[Alternative]:
        """Return the branches as they are where no value can satisfy two, or each without the others."""
        options = [part.inner("oneOf", place) for place in range(len(schemas(part, "oneOf")))]
        expanded = [self.expand([option]) for option in options]
        pairs = combinations(expanded, 2)
        if all(apart(one, two) for first, second in pairs for one in first for two in second):
            return [one for option in expanded for one in option]
        try:
            return [
                one
                for option in options
                for one in self.expand(
                    [option, *(other._replace(holds=False) for other in options if other != option)]
                )
            ]
        except SchemaRefused as error:
            reason = f"its branches overlap, and cannot be kept apart ({error}); use anyOf"
            raise SchemaRefused(part.at("oneOf"), reason) from None

    def _negative(self, part: SchemaAssertion) -> list[Alternative]:
        """Return the alternatives of which each violates one keyword."""
        schema, found = part.schema, list[Alternative]()
        for keyword in schema:
            found += self._violating(part, keyword)
        return found

    def _violating(self, part: SchemaAssertion, keyword: str) -> list[Alternative]:
        value, path = part.schema[keyword], part.at(keyword)
        if keyword == "type":
            left = EVERY - _types(part)
            return [Alternative(types=left)] if left else []
        if keyword in ("const", "enum"):
            banned = [value] if keyword == "const" else listed(part, "enum")
            return [
                Alternative(
                    (SchemaAssertion({"not": {"enum": banned}}, f"{path}/not"),), banned=tuple(banned)
                )
            ]
        if keyword == "$ref":
            return self._one(self._references.resolved(part))
        if keyword in ("allOf", "anyOf"):
            count = range(len(schemas(part, keyword)))
            options = [part.inner(keyword, place) for place in count]
            return (
                [one for o in options for one in self._one(o)] if keyword == "allOf" else self.expand(options)
            )
        if keyword == "not":
            return self._one(part.inner("not")._replace(holds=True))
        if keyword == "required":
            return self._each(
                part.like({"type": "object", "properties": {name: False}}, f"required/not/{escape(name)}")
                for name in names(part, "required")
            )
        if keyword == "properties":
            violated = [
                {"type": "object", "required": [name], "properties": {name: {"not": inner}}}
                for name, inner in mapping(part, "properties").items()
            ]
            return self._each(part.like(one, f"properties/not/{i}") for i, one in enumerate(violated))
        opposite = _OPPOSITES.get(keyword)
        if opposite is not None and isinstance(value, int | float) and not isinstance(value, bool):
            kind, other, step = opposite
            if step < 0 and value <= 0:
                return []
            return self._each([part.like({"type": kind, other: value + step}, f"{keyword}/not")])
        if keyword == "pattern":
            return [
                Alternative(
                    (SchemaAssertion({"not": {"pattern": value}}, f"{path}/not"),), types=TYPES["string"]
                )
            ]
        if known(keyword):
            raise SchemaRefused(path, "it cannot be negated")
        return []

    def _each(self, parts: Iterable[SchemaAssertion]) -> list[Alternative]:
        return [one for part in parts for one in self._positive(part)]


_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
"""Keyword → the type that it bounds, the keyword of the values beyond it, and the step to them."""


def known(keyword: str) -> bool:
    """Check whether a keyword says anything of values."""
    return keyword in IN_PLACE or any(keyword in keywords for keywords in KEYWORDS.values())


def same(one: Json, two: Json) -> bool:
    """Check whether two JSON values are equal, where true is not 1."""
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(value, two[key]) for key, value in one.items())
    numbers = isinstance(one, int | float) and isinstance(two, int | float)
    return (numbers or type(one) is type(two)) and one == two


def _types(part: SchemaAssertion) -> frozenset[str]:
    given = part.schema["type"]
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) and name in TYPES for name in names):
        allowed = f"one of {', '.join(sorted(TYPES))}, or a list of them"
        raise SchemaRefused(part.at("type"), f"{json.dumps(given)} is not {allowed}")
    return frozenset[str]().union(*(TYPES[name] for name in names))


def _own(part: SchemaAssertion) -> Alternative:
    """Return what a schema says by its own keywords."""
    schema = part.schema
    types = _types(part) if "type" in schema else EVERY
    values = tuple(listed(part, "enum")) if "enum" in schema else None
    if "const" in schema:
        values = (schema["const"],)  # a literal value is checked against the whole schema later
    return Alternative((part,), types, values)


def _product(one: list[Alternative], two: list[Alternative], path: str) -> list[Alternative]:
    found = [merged for a in one for b in two if (merged := a.merged(b)) is not None]
    if len(found) > ALTERNATIVES:
        raise SchemaRefused(path, f"more than {ALTERNATIVES} alternatives")
    return found


def apart(one: Alternative, two: Alternative) -> bool:
    """Check whether no value can satisfy both, as far as types, values and required properties tell."""
    if one.merged(two) is None:
        return True
    if one.types != TYPES["object"] or two.types != TYPES["object"]:
        return False
    first, second = _tags(one), _tags(two)
    return any(
        not any(same(a, b) for a in first[name] for b in second[name])
        for name in first.keys() & second.keys()
    )


def _tags(alternative: Alternative) -> dict[str, list[Json]]:
    """Return the required properties that have counted values, with them."""
    required = {name for part, _ in alternative.given("required") for name in names(part, "required")}
    found = {}
    for part, properties in alternative.given("properties"):
        for name in required & set(mapping(part, "properties")):
            schema = properties[name]
            if isinstance(schema, dict) and ("const" in schema or isinstance(schema.get("enum"), list)):
                found[name] = [schema["const"]] if "const" in schema else schema["enum"]
    return found
