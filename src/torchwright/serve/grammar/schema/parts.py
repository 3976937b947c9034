"""Schemas with their paths, and how their keywords are read: what is wrong in one is refused with its path."""

from __future__ import annotations

from typing import Any, NamedTuple

Json = Any


class SchemaRefused(Exception):
    """A schema that cannot be enforced: the path of its keyword, and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class SchemaAssertion(NamedTuple):
    """A schema that must hold, or must not; its path names it."""

    schema: Json
    path: str
    holds: bool = True

    def inner(self, *keys: str | int) -> SchemaAssertion:
        """Return the schema under a keyword."""
        schema = self.schema
        for key in keys:
            schema = schema[key]
        return SchemaAssertion(
            schema, f"{self.path}/{'/'.join(escape(str(key)) for key in keys)}", self.holds
        )

    def at(self, keyword: str) -> str:
        return f"{self.path}/{escape(keyword)}"

    def like(self, schema: Json, mark: str, *, holds: bool = True) -> SchemaAssertion:
        """Return a schema that follows from this one."""
        return SchemaAssertion(schema, f"{self.path}/{mark}", holds)


def escape(key: str) -> str:
    """Return a key as a JSON pointer has it."""
    return key.replace("~", "~0").replace("/", "~1")


def mapping(part: SchemaAssertion, keyword: str) -> dict[str, Json]:
    """Return the object that a keyword has, empty where it is left out."""
    value = part.schema.get(keyword, {})
    if not isinstance(value, dict):
        raise SchemaRefused(part.at(keyword), "it is not an object")
    return value


def listed(part: SchemaAssertion, keyword: str) -> list[Json]:
    """Return the list that a keyword has."""
    value = part.schema[keyword]
    if not isinstance(value, list):
        raise SchemaRefused(part.at(keyword), "it is not a list")
    return value


def schemas(part: SchemaAssertion, keyword: str) -> list[Json]:
    """Return the list of schemas that a keyword has, empty where it is left out."""
    return listed(part, keyword) if keyword in part.schema else []


def names(part: SchemaAssertion, keyword: str) -> list[str]:
    """Return the list of names that a keyword has, empty where it is left out."""
    found = schemas(part, keyword)
    if not all(isinstance(name, str) for name in found):
        raise SchemaRefused(part.at(keyword), "it is not a list of names")
    return found
