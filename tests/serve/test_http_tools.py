"""Tool calls in text: read whatever the pieces are, and what looks like a call but is none stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchwright.serve.openai.calls import CallArguments, CallBegin, CallParser, Event, Text
from torchwright.serve.openai.conversation import Tools
from torchwright.serve.openai.parts import Function
from torchwright.serve.openai.tools import HERMES, LLAMA3, ToolFormat, required_grammar, strict_grammar

NESTED = '{"a": [1, {"b": "}]\\"{"}], "c": "é"}'
HERMES_CALLS = (
    f'Sure.\n<tool_call>\n{{"name": "add", "arguments": {NESTED}}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {"x": 1}, "name": "add"}\n</tool_call>\n and <tool_call> is no call {"name": 1}'
)
LLAMA_CALLS = (
    f'<|python_tag|>{{"name": "add", "parameters": {NESTED}}}; {{"name": "add", "parameters": {{}}}}'
)


def read(form: ToolFormat, text: str, sizes: list[int], *, parallel: bool = True) -> list[Event]:
    parser, at, found = CallParser(form, ["add"], parallel=parallel), 0, list[Event]()
    for size in sizes:
        found += parser.put(text[at : at + size])
        at += size
    return [*found, *parser.put(text[at:]), *parser.rest()]


def summary(events: list[Event]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and (name, arguments) of each call."""
    names = [event.name for event in events if isinstance(event, CallBegin)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    text = "".join(event.text for event in events if isinstance(event, Text))
    return text, list(zip(names, arguments, strict=True))


@given(st.lists(st.integers(1, 9), max_size=60))
def test_hermes_calls_are_read_in_any_pieces(sizes: list[int]) -> None:
    text, calls = summary(read(HERMES, HERMES_CALLS, sizes))
    assert calls == [("add", NESTED), ("add", '{"x": 1}')]
    assert text == 'Sure.\n and <tool_call> is no call {"name": 1}'


@given(st.lists(st.integers(1, 9), max_size=60))
def test_llama_calls_are_read_in_any_pieces(sizes: list[int]) -> None:
    assert summary(read(LLAMA3, LLAMA_CALLS, sizes)) == ("", [("add", NESTED), ("add", "{}")])


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "no call, but a <tool"),
        (HERMES, 'x <tool_call>{"name": "other", "arguments": {}}</tool_call> y'),
        (HERMES, '<tool_call>\n{"name": "add"'),
        (HERMES, '<tool_call>{"name": "ad\\q", "arguments": {}}</tool_call> y'),
        (HERMES, '<tool_call>{"name": "ad\n\\u0064", "arguments": {}}</tool_call> y'),
        (HERMES, '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "add"}</tool_call> y'),
        (LLAMA3, '{"name": "\\ud800", "parameters": {}}'),
        (LLAMA3, '{"x": 1} and more'),
        (LLAMA3, "plain { text"),
        (LLAMA3, '{"name": "other", "parameters": {}}'),
    ],
)
def test_what_is_no_call_is_text(form: ToolFormat, text: str, size: int) -> None:
    assert summary(read(form, text, [size] * len(text))) == (text, [])


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser(HERMES, ["add"])
    begun = parser.put('<tool_call>\n{"name": "add", "arguments": {"a')
    assert isinstance(begun[0], CallBegin)
    assert begun[1:] == [CallArguments(0, '{"a')]
    assert parser.put('": 1') == [CallArguments(0, '": 1')]
    assert parser.calls == 0
    assert parser.put("}}\n</tool_call>") == [CallArguments(0, "}")]
    assert parser.calls == 1


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    assert summary(read(LLAMA3, '{"name": "add", "parameters": {"a', [])) == ("", [("add", '{"a')])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_only_one_call_where_one_is_wanted(size: int) -> None:
    found = read(HERMES, HERMES_CALLS, [size] * len(HERMES_CALLS), parallel=False)
    assert summary(found) == ("Sure.", [("add", NESTED)])


def test_grammars_say_what_may_be_called() -> None:
    add = Function(name="add", parameters={"properties": {"a": {"type": "integer"}}})
    sub = Function(name="sub", strict=True)
    form = json.loads(required_grammar(HERMES, [add, sub], parallel=False))["format"]
    assert form["at_least_one"] is True
    assert form["stop_after_first"] is True
    assert form["tags"][0]["begin"] == '<tool_call>\n{"name": "add", "arguments": '
    assert form["tags"][0]["content"]["json_schema"] == {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
    }
    assert strict_grammar(HERMES, [add]) is None
    assert strict_grammar(HERMES, [add, sub]) is not None
    named = Tools(functions=[add, sub], choice="sub", named=True).grammar(LLAMA3)
    assert named is not None
    assert [tag["begin"] for tag in json.loads(named.text)["format"]["tags"]] == [
        '{"name": "sub", "parameters": '
    ]
    assert Tools(functions=[add], choice="auto").grammar(HERMES) is None
    assert Tools(functions=[add, sub], choice="none").grammar(HERMES) is None
