"""Keywords that xgrammar's own converter ignores; it writes the schemas of calls whose arguments are elements.

The converter looks at one of `SELECTORS` and ignores its neighbours, and other keywords it ignores everywhere.
"""

from __future__ import annotations

from torchwright.serve.grammar.schema.expand import known
from torchwright.serve.grammar.schema.parts import Json, Part, SchemaRefused, mapping, names

SELECTORS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
IGNORED = frozenset(
    {
        *("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "contains", "uniqueItems"),
        *("unevaluatedItems", "unevaluatedProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "multipleOf", "additionalItems", "$dynamicRef", "$recursiveRef"),
    }
)
LENGTHS = ("minLength", "maxLength")


def check_converted(schema: Json) -> None:
    """Raise `SchemaRefused` for a schema that the converter would not enforce."""
    _check(Part(schema, "#"))


def _check(part: Part) -> None:
    schema = part.schema
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaRefused(part.path, "a schema is an object or a boolean")
    for keyword in schema.keys() & IGNORED:
        if schema[keyword] is not False:
            raise SchemaRefused(part.at(keyword), "it is not enforced in this model's form of calls")
    selected = [keyword for keyword in SELECTORS if keyword in schema]
    literal = {"const", "enum"} & set(selected)
    beside = [word for word in schema if known(word) and word not in selected] if selected else []
    beside += selected[1:] + (["type"] if selected and not literal and "type" in schema else [])
    if beside:
        raise SchemaRefused(
            part.at(beside[0]), f"it is not enforced next to {selected[0]} in this form of calls"
        )
    lengths = [keyword for keyword in LENGTHS if keyword in schema]
    if "pattern" in schema and (lengths or "format" in schema):
        raise SchemaRefused(
            part.at("pattern"), "it is not enforced with a length or format in this form of calls"
        )
    if "format" in schema and lengths:
        raise SchemaRefused(part.at("format"), "it is not enforced with a length in this form of calls")
    listed = mapping(part, "properties")
    if missing := [name for name in names(part, "required") if name not in listed]:
        raise SchemaRefused(part.at("required"), f"'{missing[0]}' is not in properties")
    for inner in _inner(part):
        _check(inner)


def _inner(part: Part) -> list[Part]:
    schema = part.schema
    found = [
        part.inner(word) for word in ("items", "additionalProperties") if isinstance(schema.get(word), dict)
    ]
    for word in ("properties", "$defs", "definitions"):
        found += [part.inner(word, name) for name in mapping(part, word)]
    for word in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            found += [part.inner(word, place) for place in range(len(schema[word]))]
    return found
