"""References inside of one schema: what a $ref names, and that no value's schema refers to itself."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote

from torchwright.serve.grammar.schema.parts import Json, SchemaAssertion, SchemaRefused, escape

ONE = ("not", "if", "then", "else")
SEVERAL = ("allOf", "anyOf", "oneOf")
NAMED = ("dependentSchemas", "dependencies")


class References:
    """The references of one schema. Raises `SchemaRefused` where one leads back to itself for the same value."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._done: set[str] = set()
        for part in _all(SchemaAssertion(root, "#")):
            self._follow(part, ())

    def resolved(self, part: SchemaAssertion) -> SchemaAssertion:
        """Return what a part's $ref names. Raises `SchemaRefused`."""
        ref = part.schema["$ref"]
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise SchemaRefused(
                part.at("$ref"), "only references into the schema itself, such as #/$defs/NAME"
            )
        found, path = self._root, "#"
        for key in ref.split("/")[1:]:
            key = unquote(key).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise SchemaRefused(part.at("$ref"), f"nothing is at {ref}") from None
            path += f"/{escape(key)}"
        return SchemaAssertion(found, path, part.holds)

    def _follow(self, part: SchemaAssertion, above: tuple[str, ...]) -> None:
        if part.path in above:
            raise SchemaRefused(part.path, "a $ref that leads back to itself")
        if part.path in self._done or not isinstance(part.schema, dict):
            return
        for inner in self._in_place(part):
            self._follow(inner, (*above, part.path))
        self._done.add(part.path)

    def _in_place(self, part: SchemaAssertion) -> Iterator[SchemaAssertion]:
        """Return the schemas that are asked about the same value."""
        schema = part.schema
        if isinstance(schema.get("$ref"), str):
            yield self.resolved(part)
        for keyword in ONE:
            if keyword in schema:
                yield part.inner(keyword)
        for keyword in SEVERAL:
            if isinstance(schema.get(keyword), list):
                yield from (part.inner(keyword, place) for place in range(len(schema[keyword])))
        for keyword in NAMED:
            if isinstance(schema.get(keyword), dict):
                yield from (part.inner(keyword, name) for name in schema[keyword])


def _all(part: SchemaAssertion) -> Iterator[SchemaAssertion]:
    """Return every object of a schema; constants among them do no harm."""
    yield part
    if isinstance(part.schema, dict):
        for key, value in part.schema.items():
            if isinstance(value, dict | list) and key not in ("const", "enum", "default", "examples"):
                yield from _all(part.inner(key))
    elif isinstance(part.schema, list):
        for place in range(len(part.schema)):
            yield from _all(part.inner(place))
