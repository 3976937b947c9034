"""Arguments written as elements: what the grammar allows, the parser reads as values that satisfy the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from ebnf_texts import Texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema
from jsonschema import Draft202012Validator
from schema_strategies import CLOSED, SCHEMAS
from schema_support import accepts, compiler, walk

from torchwright.serve.formats.base import Callable
from torchwright.serve.formats.markup import MarkupFormat
from torchwright.serve.formats.reader import CallArguments, CallBegin
from torchwright.serve.formats.tools import TOOL_FORMATS
from torchwright.serve.grammar.schema.elements import elements_grammar
from torchwright.serve.grammar.schema.parts import SchemaRefused

STYLES = ("qwen3_coder", "glm4")
FORMS = pytest.mark.parametrize("name", STYLES)


def form_of(name: str) -> MarkupFormat:
    form = TOOL_FORMATS[name]
    assert isinstance(form, MarkupFormat)
    return form


def read(name: str, schema: Any, elements: str) -> Any:
    """The arguments that the parser makes of elements; fails unless they are one whole call."""
    form = form_of(name)
    parser = form.parser([Callable(name="f", schema=schema)])
    text = f"{form.begin}{form.open}f{form.after_name}{elements}{form.end}"
    events = [*parser.put(text), *parser.rest()]
    assert isinstance(events[0], CallBegin), text
    assert all(isinstance(event, CallArguments) for event in events[1:]), (text, events)
    return json.loads("".join(event.text for event in events[1:] if isinstance(event, CallArguments)))


def element(name: str, key: str, text: str) -> str:
    if name == "glm4":
        return f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>"
    return f"<parameter={key}>\n{text}\n</parameter>"


def written(name: str, values: dict[str, Any]) -> str:
    """Elements as the model's template writes them: strings bare, other values as JSON."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return "\n".join(element(name, key, text) for key, text in texts.items())


@FORMS
@pytest.mark.parametrize("again", ["b", "a"])
def test_an_argument_that_comes_twice_counts_once_wherever_it_comes(name: str, again: str) -> None:
    """Before, one that came last again was text behind a call that ended early."""
    schema = {"type": "object", "patternProperties": {"^[ab]": {"type": "null"}}}
    elements = "\n".join(element(name, key, "null") for key in ("a", "b", again))
    assert read(name, schema, elements) == {"a": None, "b": None}


def takes(name: str, schema: Any, elements: str) -> bool:
    return accepts(compiler().compile_grammar(elements_grammar(schema, form_of(name).style)), elements)


def of(a: Any, **more: Any) -> dict[str, Any]:
    """A schema of arguments with one required property."""
    return {"type": "object", "properties": {"a": a}, "required": ["a"], **more}


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TAKEN: dict[str, tuple[Any, list[Any], list[str]]] = {
    "a string, bare": (of({"type": "string"}), ["", " x\n", "null", "12", '"q"', "<b>\n</b>"], []),
    "a string of a length": (of({"type": "string", "minLength": 2, "maxLength": 3}), ["ab", "<b>"], ["a", "abcd"]),
    "a long string": (of({"type": "string", "maxLength": 3000}), ["a" * 2999], ["<", "a" * 3001]),
    "a long string or null": (of({"type": ["string", "null"], "maxLength": 3000}), [None], ["<", '"' * 3]),
    "a pattern and a length": (of({"type": "string", "pattern": "^a", "maxLength": 2}), ["a", "ab"], ["b", "abc"]),
    "an enumeration": (of({"enum": ["x", "true", 2, None]}), ["x", 2, None], ["true", "y", "3"]),
    "an enumeration next to a bound": (of({"enum": [1, 50], "maximum": 10}), [1], ["50"]),
    "an integer next to anyOf": (of({"type": "integer", "anyOf": [{"minimum": 2}]}), [2, 30], ["1", "x"]),
    "a string or null": (of(OPTIONAL), ["x", "", "1 a", "[x]", None], ['"', " x"]),
    "a string or a number": (of({"type": ["string", "number"]}), ["x", 1.5], ["1x", "-"]),
    "not a value": (of({"type": "string", "not": {"enum": ["x"]}}), ["y", "xx"], ["x"]),
    "an array": (of({"type": "array", "items": {"type": "string"}, "maxItems": 1}), [[], ["x"]], ["x", '["a", "b"]']),
    "anything": (of({}), ["x", 1, None, {"a": [1]}, " \n"], []),
    "through a reference": (of({"$ref": "#/$defs/s"}, **{"$defs": {"s": {"type": "integer"}}}), [1], ["x"]),
}  # fmt: skip


@pytest.mark.plain("not a value-qwen3_coder")
@FORMS
@pytest.mark.parametrize("case", TAKEN)
def test_a_value_is_taken_and_comes_back(name: str, case: str) -> None:
    schema, right, wrong = TAKEN[case]
    for value in right:
        assert Draft202012Validator(schema).is_valid({"a": value}), "the test's own value is wrong"
        elements = written(name, {"a": value})
        assert takes(name, schema, elements), value
        assert read(name, schema, elements) == {"a": value}
    for text in wrong:
        assert not takes(name, schema, element(name, "a", text)), text


@FORMS
def test_keywords_of_the_whole_object_are_enforced(name: str) -> None:
    integer = {"type": "integer"}
    schema = {
        "type": "object",
        "properties": {"a": integer, "b": integer},
        "dependentRequired": {"a": ["b"]},
        "minProperties": 1,
        "additionalProperties": False,
    }
    for value, good in (
        ({"a": 1, "b": 2}, True),
        ({"b": 2}, True),
        ({"a": 1}, False),
        ({}, False),
        ({"c": 1}, False),
    ):
        assert takes(name, schema, written(name, value)) == good, value
    named = {
        "type": "object",
        "patternProperties": {"^x": {"type": "boolean"}},
        "additionalProperties": integer,
    }
    assert takes(name, named, written(name, {"xa": True, "b": 1}))
    assert not takes(name, named, written(name, {"xa": 1}))
    assert takes(name, {"type": "object"}, written(name, {"any": "text", "more": [1]}))


@FORMS
def test_a_value_cannot_hold_its_own_end(name: str) -> None:
    ends = "</parameter>\n</function>" if name == "qwen3_coder" else "</arg_value>"
    for schema, text in (
        ({"type": "string"}, f"x{ends}y"),
        ({"type": "array"}, json.dumps([ends])),
        ({}, f"x{ends}"),
    ):
        assert not takes(name, of(schema), element(name, "a", text))
    escaped = json.dumps([ends]).replace("<", "\\u003c")
    assert takes(name, of({"type": "array"}), element(name, "a", escaped))
    assert read(name, of({"type": "array"}), element(name, "a", escaped)) == {"a": [ends]}


def test_a_value_on_the_line_of_its_tags_is_taken() -> None:
    """Seed-OSS writes so."""
    schema = of({"type": "string"}, properties={"a": {"type": "string"}, "b": {"type": "integer"}})
    text = "<parameter=a>x y</parameter>\n<parameter=b>3</parameter>"
    assert takes("seed_oss", schema, text)
    assert read("seed_oss", schema, text) == {"a": "x y", "b": 3}


REFUSED: dict[str, Any] = {
    "#/properties/a/uniqueItems": of({"type": "array", "uniqueItems": True}),
    "#/enum": {"enum": [{"a": 1}]},
    "#": {"type": "object", "required": ["a b"]},
}


@FORMS
@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_enforced_is_refused_with_its_path(name: str, path: str) -> None:
    with pytest.raises(SchemaRefused) as refused:
        elements_grammar(REFUSED[path], form_of(name).style)
    assert refused.value.path in (path, "#")


def check(name: str, schema: Any, *, drawn: int, walks: int) -> None:
    """Check that the parser makes of every text of an accepted schema's grammar arguments that satisfy the schema."""
    try:
        grammar = elements_grammar(schema, form_of(name).style)
    except SchemaRefused:
        return
    choose, texts = random.Random(0), list[str]()
    try:
        drawer = Texts(grammar)
        texts = [drawer.draw(choose) for _ in range(drawn)]
    except RecursionError:  # no text comes to an end, which is refused once it is compiled
        pass
    if walks:
        known = compiler().compile_grammar(grammar)
        assert all(accepts(known, text) for text in texts[:walks])
        texts += [text for _ in range(walks) if (text := walk(known, choose)) is not None]
    validator = Draft202012Validator(schema)
    for text in texts:
        found = read(name, schema, text)
        assert validator.is_valid(found), (schema, text, found)


ARGUMENTS = st.one_of(
    SCHEMAS,
    st.builds(
        lambda a, b, one: of(a, **{"$defs": one["$defs"]}) | {"properties": {"a": a, "b": b}},
        SCHEMAS,
        SCHEMAS,
        SCHEMAS,
    ),
)
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.plain("glm4")
@FORMS
@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET)
@given(schema=ARGUMENTS)
def test_no_elements_of_a_random_schema_violate_it(name: str, schema: Any) -> None:
    check(name, schema, drawn=4, walks=0)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@FORMS
@settings(max_examples=2000, deadline=None, suppress_health_check=QUIET)
@given(schema=ARGUMENTS)
def test_no_elements_of_many_random_schemas_violate_them(name: str, schema: Any) -> None:
    check(name, schema, drawn=8, walks=3)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@FORMS
@settings(max_examples=200, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_values_that_others_draw_of_closed_schemas_are_taken(name: str, data: st.DataObject) -> None:
    """A grammar that allows nothing would pass the tests above; JSON escapes < here, and strings are trimmed."""
    schema: Any = data.draw(CLOSED)
    value = data.draw(from_schema(schema))
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
    if isinstance(value, str) and (text != text.strip() or "</" in text or text.lower() in ("null", "none")):
        return
    if isinstance(value, str) and text.startswith('"'):
        text = json.dumps(text)
    forms = [text]
    if isinstance(value, str) and text[:1] in ("[", "{"):
        forms.append(
            json.dumps(text)
        )  # bare it would begin an array or an object where one is allowed as well
    assert any(takes(name, of(schema), element(name, "a", form)) for form in forms), (schema, value)
