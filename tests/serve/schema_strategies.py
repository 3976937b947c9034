"""Random JSON schemas of every keyword that grammars enforce, and closed ones of which every value is allowed."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "ab", 'q"', "é"])
TEXTS = st.sampled_from(["", "a", "b", "ab", "x\\", '"', "é"])
PATTERNS = st.sampled_from(
    ["a", "^b", "^[ab]+$", '"', r"\\$", r"^\w\d?$", "[^a]", "^(?!a)", "^$|x", r"\s", "."]
)
NUMBERS = st.one_of(st.integers(-20, 20), st.sampled_from([0.5, -1.25, 2.0, 1e3]))
VALUES = st.one_of(
    st.none(), st.booleans(), NUMBERS, TEXTS, st.lists(st.integers(0, 2), max_size=2), st.just({"a": 1})
)
COUNTS = st.integers(0, 3)
KEYWORDS: dict[str, Any] = {
    "type": st.one_of(
        st.sampled_from(["string", "integer", "number", "object", "array", "boolean", "null"]),
        st.lists(st.sampled_from(["string", "integer", "null", "object", "array"]), min_size=1, max_size=3),
    ),
    "enum": st.lists(VALUES, min_size=1, max_size=4),
    "const": VALUES,
    **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], NUMBERS),
    "multipleOf": st.integers(1, 7),
    **dict.fromkeys(
        ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"], COUNTS
    ),
    "pattern": PATTERNS,
    "format": st.sampled_from(["date", "uuid", "ipv4", "unknown"]),
    "uniqueItems": st.booleans(),
    "required": st.lists(NAMES, max_size=2),
    "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2), max_size=2),
    "$ref": st.just("#/$defs/one"),
}  # fmt: skip


_SCALARS = st.sampled_from(
    [
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"type": "string", "minLength": 1, "maxLength": 4},
        {"type": "integer", "minimum": -30, "maximum": 1000},
        {"type": "boolean"},
        {"enum": ["x", 1, None]},
        {"type": ["null", "string"], "maxLength": 2},
    ]
)
CLOSED = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.builds(
            lambda item, most: {"type": "array", "items": item, "maxItems": most}, inner, st.integers(0, 3)
        ),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
    ),
    max_leaves=4,
)
"""Schemas of which a grammar allows every value."""


def _nested(inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    lists = st.lists(inner, min_size=1, max_size=3)
    return {
        **dict.fromkeys(["not", "if", "then", "else", "items", "contains", "additionalProperties"], inner),
        **dict.fromkeys(["allOf", "anyOf", "oneOf", "prefixItems"], lists),
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1),
        "propertyNames": inner,
    }


def _schemas(depth: int) -> st.SearchStrategy[Any]:
    inner = st.booleans() if not depth else st.one_of(_schemas(depth - 1), _schemas(depth - 1), st.booleans())
    words = KEYWORDS | (_nested(inner) if depth else {})
    # A few keywords at a time: of many, hardly any value satisfies all.
    return st.lists(st.sampled_from(sorted(words)), min_size=1, max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: words[name] for name in names})
    )


SCHEMAS = st.builds(lambda schema, one: {**schema, "$defs": {"one": one}}, _schemas(2), _schemas(1))
