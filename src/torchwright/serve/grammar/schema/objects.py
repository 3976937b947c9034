"""Objects that satisfy an alternative of a schema, as expressions of a grammar."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Protocol

from torchwright.serve.grammar.schema.expand import IN_PLACE, Alternative
from torchwright.serve.grammar.schema.language import (
    ANYTHING,
    Chars,
    Node,
    alt,
    both,
    literal,
    matches,
    negate,
    repeat,
)
from torchwright.serve.grammar.schema.parts import SchemaAssertion, SchemaRefused, mapping, names
from torchwright.serve.grammar.schema.rules import GrammarRules
from torchwright.serve.grammar.schema.scalars import count, pattern, texts
from torchwright.serve.grammar.schema.writer import Writer

PATTERNS = 4
"""Patterns of names at most: each set of them that a name can match has its own schema."""
EXCLUDED = 400
"""Limit of characters in listed names; beyond it other names are not allowed."""


class MemberForm(Protocol):
    """The way that members are written: a name and a value."""

    comma: str
    """Expression between two members."""
    end: str
    """Expression behind the last member."""

    def listed(self, writer: Writer, name: str, parts: list[SchemaAssertion]) -> str | None:
        """Return a member of this name whose value satisfies the parts; None if no value does."""
        ...

    def other(self, writer: Writer, naming: Node, parts: list[SchemaAssertion]) -> str | None:
        """Return the members with a name of a language."""
        ...


class JsonMembers:
    """Members of JSON objects."""

    comma, end = "comma ", "ws"

    def listed(self, writer: Writer, name: str, parts: list[SchemaAssertion]) -> str | None:
        rule = writer.node(parts)
        return None if rule is None else f"{writer.rules.value(name)} colon {rule}"

    def other(self, writer: Writer, naming: Node, parts: list[SchemaAssertion]) -> str | None:
        rule = writer.node(parts)
        if rule is None:
            return None
        if naming == ANYTHING:
            return f"name colon {rule}"
        # A name in which nothing is escaped has one spelling only.
        key = writer.rules.string(both(naming, repeat(Chars(writer.rules.unescaped), 0, None)))
        return None if key is None else f"{key} colon {rule}"


def object_(writer: Writer, one: Alternative, types: frozenset[str]) -> str | None:
    """Return the objects that satisfy an alternative."""
    found = members(writer, one, JsonMembers())
    return None if found is None else f'"{{" ws {found} "}}"'


def members(writer: Writer, one: Alternative, form: MemberForm) -> str | None:
    """Return the members of the objects that satisfy an alternative; None if no object does."""
    return _Object(writer, one, form).write()


class _Object:
    """The members of one object."""

    def __init__(self, writer: Writer, one: Alternative, form: MemberForm) -> None:
        self._writer, self._one, self._form = writer, one, form
        if any(isinstance(item, dict) for item in one.banned):
            raise SchemaRefused(one.parts[0].path, "objects cannot be excluded by value")
        self._listed = list(dict.fromkeys(name for part in one.parts for name in mapping(part, "properties")))
        self._required = dict.fromkeys(name for part in one.parts for name in names(part, "required"))
        self._least = max((count(part, "minProperties") for part, _ in one.given("minProperties")), default=0)
        self._most = min(
            (count(part, "maxProperties") for part, _ in one.given("maxProperties")), default=None
        )
        self._patterns = [
            (part, regex, part.at("patternProperties"))
            for part in one.parts
            for regex in mapping(part, "patternProperties")
        ]

    def write(self) -> str | None:
        members = []
        for name in dict.fromkeys([*self._listed, *self._required]):
            text = None
            if self._may_be_named(name):
                text = self._form.listed(self._writer, name, self._property(name))
            if text is not None:
                members.append(Member(text, name in self._required))
            elif name in self._required:
                return None
        others = self._others()
        certain = len(self._required) + 1
        if others and self._least > max(certain, 1):
            part, _ = next(self._one.given("minProperties"))
            reason = (
                f"names may come twice, so that only {certain} properties are certain; list them in required"
            )
            raise SchemaRefused(part.at("minProperties"), reason)
        tails = _Tails(self._writer.rules, self._form, members, others, self._least, self._most)
        return tails.tail(0, 0)

    def _property(self, name: str) -> list[SchemaAssertion]:
        """Return what all parts say of a property."""
        found = []
        for part in self._one.parts:
            own = [part.inner("properties", name)] if name in mapping(part, "properties") else []
            certain = bool(own)
            for regex in mapping(part, "patternProperties"):
                path = part.at("patternProperties")
                if matches(pattern(regex, path, outer=True), name):
                    own.append(part.inner("patternProperties", regex))
                    certain |= matches(pattern(regex, path), name)
            found += own
            if not certain and (extra := _extra(part)) is not None:
                found.append(extra)
        return found

    def _may_be_named(self, name: str) -> bool:
        return matches(self._naming, name)

    @cached_property
    def _naming(self) -> Node:
        """The language of names that `propertyNames` allows."""
        parts = [part.inner("propertyNames") for part, _ in self._one.given("propertyNames")]
        if not parts:
            return ANYTHING
        found = self._writer.alternatives(parts)
        return alt(*(texts(one) for one in found if "string" in one.types))

    def _others(self) -> str | None:
        """Return the rule of members with unlisted names, or None."""
        extras = [extra for part in self._one.parts if (extra := _extra(part)) is not None]
        counted = len(dict.fromkeys([*self._listed, *self._required]))
        closed = not extras and (bool(self._listed) or bool(self._patterns)) and self._least <= counted
        if len(self._patterns) > PATTERNS:
            path = self._patterns[PATTERNS][2]
            raise SchemaRefused(path, f"more than {PATTERNS} patterns for one object")
        if self._most == 0 or sum(map(len, [*self._listed, *self._required])) > EXCLUDED:
            return None
        found = []
        for matched in product((True, False), repeat=len(self._patterns)):
            if any(matched) or not closed:
                found.append(self._class(matched))
        found = [text for text in found if text is not None]
        return f"({' | '.join(found)})" if found else None

    def _class(self, matched: tuple[bool, ...]) -> str | None:
        """Return members whose names match these patterns and no others."""
        schemas, naming = [], [self._naming]
        for part in self._one.parts:
            inner = [
                part.inner("patternProperties", regex)
                for (owner, regex, _), found in zip(self._patterns, matched, strict=True)
                if found and owner is part
            ]
            extra = _extra(part)
            schemas += inner or ([] if extra is None else [extra])
        for (_, regex, path), found in zip(self._patterns, matched, strict=True):
            naming.append(pattern(regex, path) if found else negate(pattern(regex, path, outer=True)))
        naming += [negate(literal(name)) for name in (*self._listed, *self._required)]
        return self._form.other(self._writer, both(*naming), schemas)


def _extra(part: SchemaAssertion) -> SchemaAssertion | None:
    """Return what a part says of properties that it does not list."""
    schema = part.schema
    if "additionalProperties" in schema:
        return part.inner("additionalProperties")
    if schema.get("unevaluatedProperties", True) is not True:
        if any(word in schema for word in (*IN_PLACE, "dependentSchemas")):
            reason = "it is not enforced next to other schemas; use additionalProperties"
            raise SchemaRefused(part.at("unevaluatedProperties"), reason)
        return part.inner("unevaluatedProperties")
    return None


@dataclass(frozen=True)
class Member:
    """A listed property with its value, and whether it must be there."""

    text: str
    required: bool


class _Tails:
    """Rules for what may follow the first members, by their number; of members, there are `least` to `most`."""

    def __init__(
        self,
        rules: GrammarRules,
        form: MemberForm,
        members: list[Member],
        others: str | None,
        least: int,
        most: int | None,
    ) -> None:
        self._rules, self._form, self._members, self._others = rules, form, members, others
        self._least, self._most = least, most
        self._known: dict[tuple[int, int], str | None] = {}

    def tail(self, place: int, written: int) -> str | None:
        """Return what may follow where members before `place` are done and so many of them are written."""
        written = min(written, max(self._least, 1) if self._most is None else self._most)
        key = place, written
        if key not in self._known:
            name = self._known[key] = self._rules.new()
            bodies = [body for body in self._bodies(place, written) if body is not None]
            if bodies:
                self._rules.define(name, " | ".join(bodies))
            else:
                self._rules.drop(name)
                self._known[key] = None
        return self._known[key]

    def _bodies(self, place: int, written: int) -> Iterator[str | None]:
        comma = self._form.comma if written else ""
        more = self._most is None or written < self._most
        if place < len(self._members):
            member = self._members[place]
            if more and (rest := self.tail(place + 1, written + 1)) is not None:
                yield f"{comma}{member.text} {rest}"
            if not member.required:
                yield self.tail(place + 1, written)
            return
        if written >= self._least:
            yield self._form.end if written else '""'
        if self._others is not None and more and (rest := self.tail(place, written + 1)) is not None:
            yield f"{comma}{self._others} {rest}"
