"""Values of arguments that are written without JSON's quotes: their types are those of the function's schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Constants as Python or JSON writes them, in upper or lower case."""
FORMS = {"enum", "const", "pattern", "format", "maxLength"}
"""Keywords of strings with a form of their own, from which white space around the text is removed."""
REFERENCES = 32
"""References that are followed at most: a schema may refer to itself."""


def decode(text: str) -> Any:
    """Return the value of a JSON text, or None where it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None


def value_of(text: str, schema: Any, root: dict[str, Any]) -> Any:
    """Return the value of an argument's text by its schema, a part of `root`.

    What a schema takes only as a string is one; other text is JSON where the schema takes its type, and a string
    where not even the schema helps.
    """
    types = types_of(schema, root)
    if types == {"string"}:
        return text.strip() if is_stripped(schema) else text
    stripped = text.strip()
    value = WORDS[stripped.lower()] if stripped.lower() in WORDS else decode(stripped)
    if value is None and stripped.lower() not in ("null", "none"):
        return text
    kind = "null" if value is None else TYPES[type(value)]
    fits = kind in types or (kind == "integer" and "number" in types)
    return value if fits or ("string" not in types and (types or kind != "string")) else text


def types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """Return the types that an argument's text is read as; none where the schema does not say."""
    return set(_types(schema, root))


def is_stripped(schema: Any) -> bool:
    """Check whether white space around a string's text is removed."""
    return isinstance(schema, dict) and bool(FORMS & schema.keys())


def schema_of(name: str, root: dict[str, Any]) -> Any:
    """Return the schema of an argument."""
    properties = root.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _types(schema: Any, root: dict[str, Any], references: int = REFERENCES) -> Iterator[str]:
    """Yield the types that a schema takes; nothing where it does not say."""
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from (item for item in kind if isinstance(item, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, schema["const"]] if "const" in schema else values
    if kind is None:
        yield from ("null" if value is None else TYPES.get(type(value), "string") for value in values)
    for word in ("anyOf", "oneOf", "allOf"):
        for part in schema[word] if isinstance(schema.get(word), list) else []:
            yield from _types(part, root, references)
    reference = schema.get("$ref")
    if isinstance(reference, str) and references:
        yield from _types(_referred(reference, root), root, references - 1)


def _referred(reference: str, root: dict[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return found
