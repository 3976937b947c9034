"""One rule of a grammar for each set of schemas that hold together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchwright.serve.grammar.schema.endless import endless
from torchwright.serve.grammar.schema.expand import EVERY, KEYWORDS, TYPES, Alternative, Expander, same
from torchwright.serve.grammar.schema.language import TooLarge
from torchwright.serve.grammar.schema.parts import SchemaAssertion, SchemaRefused
from torchwright.serve.grammar.schema.rules import GrammarRules

Kind = Callable[["Writer", Alternative, frozenset[str]], str | None]
"""Writes the values of one JSON type that satisfy an alternative of these types; None if no value does."""


class Writer:
    """Writes the rules of one schema; `kinds` write those of each JSON type that is not a literal."""

    def __init__(self, root: Any, kinds: Mapping[str, Kind], escaping: str = "") -> None:
        self.rules = GrammarRules(escaping)
        self._kinds = kinds
        self._root, self._expander = root, Expander(root)
        self._names: dict[frozenset[tuple[str, bool]], str | None] = {}
        self._open: set[str] = set()
        """Rules that are being written."""
        self._recursive: set[str] = set()
        """Rules that were asked for while they were being written."""

    def alternatives(self, parts: Iterable[SchemaAssertion]) -> list[Alternative]:
        """Return the ways to satisfy parts."""
        return self._expander.expand(parts)

    def node(self, parts: Iterable[SchemaAssertion]) -> str | None:
        """Return the rule of values for which all parts hold; None if no value does."""
        parts = [part for part in parts if not _says_nothing(part)]
        if not parts:
            return "value"
        key = frozenset((part.path, part.holds) for part in parts)
        if key in self._names:
            name = self._names[key]
            if name in self._open:
                self._recursive.add(name)
            return name
        name = self._names[key] = self.rules.new()
        self._open.add(name)
        bodies = [body for one in self.alternatives(parts) for body in self.bodies(one)]
        self._open.remove(name)
        if bodies:
            self.rules.define(name, " | ".join(dict.fromkeys(bodies)))
            return name
        if name in self._recursive:
            raise SchemaRefused(parts[0].path, "no value satisfies it")
        self.rules.drop(name)
        self._names[key] = None
        return None

    def text(self, root: str) -> str:
        """Return the grammar. Raises `SchemaRefused` for a part that no value with an end satisfies."""
        bodies = self.rules.bodies(root)
        stuck = endless(bodies) if self._recursive else []
        if stuck:
            paths = {name: min(path for path, _ in key) for key, name in self._names.items() if name}
            raise SchemaRefused(
                next((paths[name] for name in stuck if name in paths), "#"), "no finite value satisfies it"
            )
        return "\n".join(f"{name} ::= {body}" for name, body in bodies.items())

    def bodies(self, one: Alternative) -> list[str]:
        """Return the expressions of the JSON values that satisfy an alternative."""
        if one.values is not None:
            return [self.rules.value(data) for data in one.values if self.satisfies(one, data)]
        types = meant(one)
        if types == EVERY and not one.banned:
            return ["value"]
        found = [self.rules.value(data) for data in (None, False, True) if self.satisfies(one, data, types)]
        for kind, write in self._kinds.items():
            part = TYPES[kind] & types
            try:
                body = write(self, one, part) if part else None
            except TooLarge:
                raise SchemaRefused(one.parts[0].path, f"the grammar of its {kind} grows too large") from None
            if body is not None:
                found.append(body)
        return found

    def satisfies(self, one: Alternative, data: Any, types: frozenset[str] | None = None) -> bool:
        """Check a literal value against everything that an alternative says."""
        kind = _kind(data)
        if kind not in (one.types if types is None else types) or any(
            same(data, other) for other in one.banned
        ):
            return False
        try:
            return all(self._validator.evolve(schema=part.schema).is_valid(data) for part in one.parts)
        except Exception as error:
            raise SchemaRefused(one.parts[0].path, f"{json.dumps(data)} cannot be checked: {error}") from None

    @property
    def _validator(self) -> Any:
        from jsonschema import Draft202012Validator
        from jsonschema.validators import validator_for
        from referencing import Registry

        kind: Any = validator_for(self._root, default=Draft202012Validator)
        return kind(self._root, registry=Registry())  # which fetches nothing


def _says_nothing(part: SchemaAssertion) -> bool:
    return part.schema is part.holds or (part.holds and part.schema == {})


def meant(one: Alternative) -> frozenset[str]:
    """Return an alternative's types: where it names none, those that its keywords are about."""
    if one.types != EVERY:
        return one.types
    used = {keyword for part in one.parts for keyword in part.schema}
    return (
        frozenset[str]().union(*(TYPES[kind] for kind, words in KEYWORDS.items() if used & set(words)))
        or EVERY
    )


def _kind(data: Any) -> str:
    if data is None:
        return "null"
    if isinstance(data, bool):
        return "boolean"
    if isinstance(data, int | float):
        return "integer" if data == int(data) else "fraction"
    return {str: "string", list: "array", dict: "object"}[type(data)]
