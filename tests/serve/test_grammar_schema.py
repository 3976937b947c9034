"""A JSON schema that is accepted is enforced: no text of its grammar violates it. The rest is refused by keyword."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from ebnf_texts import Texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema
from jsonschema import Draft202012Validator
from schema_strategies import CLOSED, SCHEMAS
from schema_support import accepts, compiled, takes, walk

from torchwright.serve.grammar.schema.emit import schema_grammar
from torchwright.serve.grammar.schema.parts import SchemaRefused
from torchwright.serve.grammar.schema.rules import UNROLLED

DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
PAIR: dict[str, Any] = {
    "type": "object",
    "properties": {"a": DIGIT, "b": DIGIT},
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": DIGIT, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["v"],
        }
    },
}
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "anyOf next to bounds": ({**DIGIT, "anyOf": [{"minimum": 8}, {"maximum": 1}]}, [0, 1, 8, 9], [2, 7, -1, 10]),
    "anyOf next to properties": (
        {**PAIR, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}],
        [{}, 5, {"a": 10}],
    ),
    "a sibling of $ref": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/s", "maxLength": 4}},
            "required": ["a"],
            "$defs": {"s": {"type": "string", "minLength": 3}},
        },
        [{"a": "abc"}, {"a": "abcd"}],
        [{"a": "ab"}, {"a": "abcde"}, {"a": 1}],
    ),
    "allOf": (
        {"allOf": [{"type": "string"}, {"minLength": 2}, {"pattern": "^a"}]},
        ["ab", "abc"],
        ["a", "bb", 1],
    ),
    "required outside properties": (
        {"type": "object", "properties": {"a": DIGIT}, "required": ["z"]},
        [{"a": 1, "z": None}, {"z": {"any": [1]}}],
        [{}, {"a": 1}],
    ),
    "enum next to bounds": ({"enum": [1, 50, "x", 99], "maximum": 60}, [1, 50, "x"], [99, 2]),
    "const next to enum": ({"const": "a", "enum": ["a", "b"]}, ["a"], ["b"]),
    "not a list of values": ({**DIGIT, "maximum": 3, "not": {"enum": [1, 2]}}, [0, 3], [1, 2]),
    "not a type": ({"not": {"type": ["string", "object", "array", "null"]}}, [1, 1.5, True], ["a", None, [], {}]),
    "not an empty schema": (
        {"type": "object", "properties": {"a": {"not": {}}, "b": DIGIT}},
        [{}, {"b": 1}],
        [{"a": 1}, {"a": None}],
    ),
    "not a pattern": ({"type": "string", "not": {"pattern": "x"}, "maxLength": 3}, ["", "ab"], ["x", "axb", "abcd"]),
    "not two conditions": (
        {"type": "string", "not": {"minLength": 2, "maxLength": 3}},
        ["", "a", "abcd"],
        ["ab", "abc"],
    ),
    "if, then and else": (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["card", "cash"]}, "number": {"type": "string"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "card"}}, "required": ["kind"]},
            "then": {"required": ["number"]},
            "else": {"properties": {"number": False}},
        },
        [{"kind": "card", "number": "1"}, {"kind": "cash"}],
        [{"kind": "card"}, {"kind": "cash", "number": "1"}],
    ),
    "dependentRequired": ({**PAIR, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    "dependentSchemas": (
        {**PAIR, "dependentSchemas": {"a": {"properties": {"b": {"const": 3}}, "required": ["b"]}}},
        [{}, {"b": 1}, {"a": 1, "b": 3}],
        [{"a": 1}, {"a": 1, "b": 2}],
    ),
    "oneOf with a tag": (
        {
            "oneOf": [
                {"type": "object", "properties": {"t": {"const": "a"}, "x": DIGIT}, "required": ["t", "x"]},
                {"type": "object", "properties": {"t": {"const": "b"}, "y": DIGIT}, "required": ["t", "y"]},
            ]
        },
        [{"t": "a", "x": 1}, {"t": "b", "y": 1}],
        [{"t": "a", "y": 1}, {"t": "c"}],
    ),
    "oneOf that overlaps": (
        {"oneOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 7}]},
        [4, 8],
        [5, 6, 7],
    ),
    "contains": (
        {"type": "array", "items": DIGIT, "contains": {"const": 1}, "maxItems": 3},
        [[1], [2, 1], [1, 1, 1], [3, 4, 1]],
        [[], [2], [2, 3, 4], [1, 2, 3, 4]],
    ),
    "minItems and prefixItems": (
        {"type": "array", "prefixItems": [DIGIT, {"type": "string"}], "items": False, "minItems": 1},
        [[1], [1, "a"]],
        [[], [1, 2], [1, "a", 3]],
    ),
    "a list of items, as older drafts have it": (
        {"type": "array", "items": [DIGIT, DIGIT], "additionalItems": {"type": "null"}, "minItems": 3},
        [[1, 2, None], [1, 2, None, None]],
        [[1, 2], [1, 2, 3]],
    ),
    "names by pattern": (
        {
            "type": "object",
            "properties": {"id": DIGIT},
            "patternProperties": {"^x_": {"type": "string"}, "_n$": {"minLength": 2}},
            "additionalProperties": False,
        },
        [{"id": 1, "x_a": "t"}, {"x_n": "tt"}],
        [{"id": "t"}, {"x_a": 1}, {"y": 1}, {"x_n": "t"}],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": DIGIT},
        [{"a": 1, "bc": 2}, {}],
        [{"d": 1}, {"a": "x"}],
    ),
    "additionalProperties beside listed ones": (
        {"type": "object", "properties": {"a": DIGIT}, "additionalProperties": {"type": "string"}},
        [{"a": 1, "ab": "x"}, {"b": "x"}],
        [{"a": "x"}, {"a": 1, "a ": 1}],
    ),
    "minProperties and maxProperties": (
        {**PAIR, "minProperties": 1, "maxProperties": 1},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 2}],
    ),
    "bounds of fractions": (
        {"type": "number", "exclusiveMinimum": -0.5, "maximum": 2.25},
        [-0.49, 0, 1.999, 2, 2.25],
        [-0.5, -1, 2.26, 3, 10],
    ),
    "bounds of integers": ({"type": "integer", "minimum": -12, "maximum": 305}, [-12, -1, 0, 9, 305], [-13, 306, 1.5]),
    "a bound that is no integer": ({"type": "integer", "minimum": 1.5}, [2, 30], [1, 0, -2]),
    "multipleOf between bounds": ({"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 16}, [5, 15], [3, 20]),
    "multipleOf without bounds": ({"type": "integer", "multipleOf": 7}, [0, 7, -14, 700], [1, 6, -13]),
    "a pattern of quotes": ({"type": "string", "pattern": '^"x"$'}, ['"x"'], ["x", "\\x"]),
    "a pattern of a backslash": ({"type": "string", "pattern": r"^C:\\[a-z]{2}$"}, ["C:\\ab"], ["C:ab", "C:/ab"]),
    "a pattern of a line feed": ({"type": "string", "pattern": r"^a\nb$"}, ["a\nb"], ["anb", "ab"]),
    "a negated set": ({"type": "string", "pattern": "^[^a-z]{2}$"}, ['"\\', "\n\t", "É😀"], ["ab", "A", "AAA"]),
    "a pattern that is found anywhere": ({"type": "string", "pattern": "ab"}, ["ab", "xaby"], ["a b", ""]),
    "a pattern and a length": ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ["a", "abc"], ["", "abcd"]),
    "lookaheads": (
        {"type": "string", "pattern": r"^(?=.*\d)(?!.*x)[a-z0-9]{2,3}$"},
        ["a1", "12", "ab1"],
        ["ab", "x1", "abc1"],
    ),
    "a decimal number, as pydantic has it": (
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ["1.5", "-007", "+.5"],
        ["", "-.", "1.5.2", "a"],
    ),
    "an address, as zod has it": (
        {
            "type": "string",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
            "[A-Za-z]{2,}$",
        },
        ["a.b@c-d.org", "x@y.zz"],
        [".a@b.cc", "a..b@c.dd", "a@b", "a b@c.dd"],
    ),
    "anchors in each branch": ({"type": "string", "pattern": "^$|^(ab|cd)$"}, ["", "ab"], ["x", "abcd"]),
    "a format": ({"type": "string", "format": "date"}, ["2024-02-28", "1999-12-31"], ["2024-13-01", "2023-02-30"]),
    "a length of characters": ({"type": "string", "minLength": 2, "maxLength": 2}, ["é😀", '"\\'], ["a", "abc"]),
    "a tree": (TREE, [{"v": 1}, {"v": 1, "next": {"v": 2, "next": None}}], [{"next": None}, {"v": 1, "next": {}}]),
    "any object": ({"type": "object"}, [{}, {"a": [1, {"b": None}]}], [1, []]),
    "any array": ({"type": "array", "maxItems": 2}, [[], [1, {"a": []}]], [[1, 2, 3], {}]),
    "anything": ({}, [None, 1.5e3, "a", [{}]], []),
    "a null that may be left out": (
        {"type": "object", "properties": {"a": {"type": ["integer", "null"]}}, "required": ["a"]},
        [{"a": None}, {"a": 5}],
        [{}, {"a": "x"}],
    ),
    "keywords for an object without a type": ({"properties": {"a": DIGIT}}, [{}, {"a": 1}], [{"a": 10}, 5]),
    "remarks": ({"type": "boolean", "title": "x", "description": "y", "x-mine": 1, "default": 3}, [True], [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", ENFORCED)
def test_a_keyword_is_enforced(name: str) -> None:
    schema, right, wrong = ENFORCED[name]
    validator = Draft202012Validator(schema) if "older" not in name else None
    grammar = compiled(schema)
    for value in right:
        assert validator is None or validator.is_valid(value), "the test's own value is wrong"
        assert accepts(grammar, json.dumps(value, ensure_ascii=False)), value
    for value in wrong:
        assert not accepts(grammar, json.dumps(value, ensure_ascii=False)), value
    choose = random.Random(0)
    for _ in range(3):
        text = walk(grammar, choose)
        assert text is None or validator is None or validator.is_valid(json.loads(text)), text


REFUSED: dict[str, Any] = {
    "#/uniqueItems": {"type": "array", "uniqueItems": True},
    "#/properties/a~1b/contains": {
        "properties": {"a/b": {"type": "array", "contains": {"const": 1}, "minContains": 2}}
    },
    "#/items/not/items": {"type": "array", "items": {"not": {"items": {"type": "string"}}}},
    "#/$ref": {"$ref": "https://example.org/schema"},
    "#/properties/a/$ref": {"properties": {"a": {"$ref": "#/$defs/none"}}},
    "#/$dynamicRef": {"$dynamicRef": "#node"},
    "#/unevaluatedProperties": {"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]},
    "#/multipleOf": {"type": "number", "multipleOf": 0.01},
    "#/minProperties": {"type": "object", "minProperties": 3},
    "#/pattern": {"type": "string", "pattern": r"(a)\1"},
    "#/oneOf": {"oneOf": [{"items": {"type": "string"}}, {"items": {"minLength": 2}}]},
    "#/type": {"type": "text"},
    "#/minLength": {"type": "string", "minLength": "2"},
    "#/exclusiveMinimum": {"type": "integer", "minimum": 1, "exclusiveMinimum": True},
    "#/allOf": {"allOf": {"type": "string"}},
    "#/properties/a": {"properties": {"a": 5}},
    "#": {"type": "string", "minLength": 3, "maxLength": 2},
    "#/$defs/a": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
}


SIZES = [(0, 101), (3, 127), (150, 150), (130, 131), (99, 996), (200, None)]


@pytest.mark.parametrize(
    ("by", "least", "most"),
    [
        *(("pattern", *bounds) for bounds in SIZES),
        *(("length", *bounds) for bounds in [*SIZES, (0, 1023), (0, 1024), (5, 4_000)]),
    ],
)
def test_long_texts_are_counted_exactly_and_in_units(by: str, least: int, most: int | None) -> None:
    """A count over 127 makes each mask 25 times as slow in xgrammar."""
    schema: dict[str, Any] = {"type": "string", "minLength": least, "maxLength": most}
    if most is None:
        del schema["maxLength"]
    if by == "pattern":
        schema = {"type": "string", "pattern": f"^.{{{least},{'' if most is None else most}}}$"}
    found = compiled(schema)
    near = [bound + one for bound in (least, most or 0) for one in (-1, 0, 1)]
    for size in {size for size in (*near, 0, least + 700) if size >= 0}:
        text = json.dumps('a"' * (size // 2) + "é" * (size % 2), ensure_ascii=False)
        assert accepts(found, text) == (size >= least and (most is None or size <= most)), size
    counts = re.findall(r"\{(\d*),?(\d*)\}", schema_grammar(schema))
    assert max(int(count) for pair in counts for count in pair if count) <= UNROLLED


LOOP: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
ENDLESS: dict[str, tuple[Any, str]] = {
    "requires itself": (LOOP, "#"),
    "a list of itself": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
    "one way or the other": (
        {"anyOf": [LOOP, {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}]},
        "#",
    ),
    "behind an optional property": (
        {
            "type": "object",
            "properties": {"b": {"$ref": "#/$defs/n"}},
            "$defs": {"n": {"type": "object", "properties": {"b": {"$ref": "#/$defs/n"}}, "required": ["b"]}},
        },
        "#/properties/b",
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_no_finite_value_satisfies_is_refused(name: str) -> None:
    """An answer would follow it until its tokens end."""
    schema, path = ENDLESS[name]
    with pytest.raises(SchemaRefused, match="no finite value") as refused:
        schema_grammar(schema)
    assert refused.value.path == path


@pytest.mark.parametrize(
    "schema",
    [
        {**LOOP, "required": []},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "null"}, LOOP]},
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 3},
    ],
)
def test_recursion_with_an_end_is_taken(schema: Any) -> None:
    schema_grammar(schema)


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_enforced_is_refused_with_its_path(path: str) -> None:
    with pytest.raises(SchemaRefused) as refused:
        schema_grammar(REFUSED[path])
    assert str(refused.value).startswith(f"{path}: ")


def check(schema: Any, *, drawn: int, walks: int) -> None:
    """Check that all texts of a schema that is accepted satisfy it: from its rules, and from tokens by xgrammar."""
    try:
        grammar = schema_grammar(schema)
    except SchemaRefused:
        return
    choose = random.Random(0)
    texts = _drawn(Texts(grammar), choose, drawn)
    if walks:
        known = compiled(schema)
        assert all(accepts(known, text) for text in texts[:walks])
        texts += [text for _ in range(walks) if (text := walk(known, choose)) is not None]
    validator = Draft202012Validator(schema)
    for text in texts:
        assert validator.is_valid(json.loads(text)), (schema, text)


def _drawn(texts: Texts, choose: random.Random, count: int) -> list[str]:
    try:
        return [texts.draw(choose) for _ in range(count)]
    except RecursionError:  # no text comes to an end, which is refused once it is compiled
        return []


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET)
@given(SCHEMAS)
def test_no_text_of_a_random_schema_violates_it(schema: Any) -> None:
    check(schema, drawn=5, walks=0)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@settings(max_examples=5000, deadline=None, suppress_health_check=QUIET)
@given(SCHEMAS)
def test_no_text_of_many_random_schemas_violates_them(schema: Any) -> None:
    check(schema, drawn=8, walks=3)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@settings(max_examples=300, deadline=None, suppress_health_check=QUIET)
@given(st.data())
def test_instances_that_others_draw_of_closed_schemas_are_taken(data: st.DataObject) -> None:
    """Values of hypothesis-jsonschema: a grammar that allows nothing would pass the tests above."""
    schema: Any = data.draw(CLOSED)
    value = {"a": data.draw(from_schema(schema)), "b": data.draw(from_schema(schema))}
    whole = {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["a", "b"]}
    assert takes(whole, value), (whole, value)


def test_a_value_is_taken_with_the_white_space_of_any_writer() -> None:
    value = {"a": 1, "b": 2}
    grammar = compiled(PAIR)
    for text in (json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=2)):
        assert accepts(grammar, text)
    assert takes(PAIR, {})
