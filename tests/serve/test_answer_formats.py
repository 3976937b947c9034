"""The contract of tool formats and reasoning formats: every row of their tables, in pieces of any size."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchwright.serve.formats.answer import AnswerForm
from torchwright.serve.formats.base import Callable, structural_tag
from torchwright.serve.formats.reader import CallArguments, CallBegin, Event, Parser, Reasoning, Text
from torchwright.serve.formats.reasoning import REASONING_FORMATS, PromptEnd, reasoning_format_of
from torchwright.serve.formats.tools import TOOL_FORMATS, tool_format_of
from torchwright.serve.openai.answers import usage


def test_usage_counts_the_proposals_of_all_choices() -> None:
    def used(*proposals: tuple[int, int]) -> dict[str, Any]:
        timings = {
            place: SimpleNamespace(cached_tokens=3, speculated_tokens=proposed, accepted_tokens=accepted)
            for place, (proposed, accepted) in enumerate(proposals)
        }
        totals = SimpleNamespace(timings=timings, reasoning_tokens=0, prompt_tokens=5, completion_tokens=9)
        generation: Any = SimpleNamespace(totals=totals, prepared=SimpleNamespace(n=2))
        return usage(generation)

    counted = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 3}
    assert used((4, 2), (4, 3))["completion_tokens_details"] == counted
    assert "completion_tokens_details" not in used((0, 0), (0, 0))


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "deep": {
            "type": "object",
            "properties": {
                "rows": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}
            },
            "required": ["rows"],
        },
    },
    "required": ["s", "n", "deep"],
}
ADD = Callable(name="add", schema=SCHEMA)
NOW = Callable(name="now", schema={"type": "object", "properties": {"zone": {"type": "string"}}})
FUNCTIONS = (ADD, NOW)
FIRST = {"s": 'two\nlines, "é" <b> 😀', "n": 3, "deep": {"rows": [1, '}]"{']}}
SECOND = {"zone": "42"}
CALLS = [("add", FIRST), ("now", SECOND)]
S = r"two\nlines, \"é\" <b> 😀"
JSON_1 = f'{{"s": "{S}", "n": 3, "deep": {{"rows": [1, "}}]\\"{{"]}}}}'
JSON_2 = '{"zone": "42"}'
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def objects(key: str = "arguments") -> list[str]:
    return [f'{{"name": "add", "{key}": {JSON_1}}}', f'{{"name": "now", "{key}": {JSON_2}}}']


def deepseek(before: str, after: str, close: str, between: str) -> str:
    calls = [
        f"{CALL_BEGIN}{before}{name}{after}{arguments}{close}{CALL_END}"
        for name, arguments in (("add", JSON_1), ("now", JSON_2))
    ]
    return CALLS_BEGIN + between.join(calls) + CALLS_END


def qwen(begin: str, end: str) -> str:
    first = f"<function=add>\n<parameter=s>\n{FIRST['s']}\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    first += f"<parameter=deep>\n{json.dumps(FIRST['deep'])}\n</parameter>\n</function>"
    second = "<function=now>\n<parameter=zone>\n42\n</parameter>\n</function>"
    return f"{begin}\n{first}\n{end}\n{begin}\n{second}\n{end}"


def python(between: str) -> str:
    first = f"""add(s="{S}", n=3, deep={json.dumps(FIRST["deep"])})"""
    return first + between + 'now(zone="42")'


GLM = (
    f"<tool_call>add\n<arg_key>s</arg_key>\n<arg_value>{FIRST['s']}</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n"
    f"<arg_key>deep</arg_key>\n<arg_value>{json.dumps(FIRST['deep'])}</arg_value>\n</tool_call>\n"
    "<tool_call>now\n<arg_key>zone</arg_key>\n<arg_value>42</arg_value>\n</tool_call>"
)
HARMONY = "<|end|><|start|>assistant".join(
    f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
    for name, arguments in (("add", JSON_1), ("now", JSON_2))
)
WRITTEN = {
    "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects()),
    "llama3_json": "; ".join(objects("parameters")),
    "pythonic": f"[{python(', ')}]",
    "olmo3": "<function_calls>\n" + python("\n") + "\n</function_calls>",
    "qwen3_coder": qwen("<tool_call>", "</tool_call>"),
    "seed_oss": qwen("<seed:tool_call>", "</seed:tool_call>"),
    "glm4": GLM,
    "mistral": f"[TOOL_CALLS]add[ARGS]{JSON_1}[TOOL_CALLS]now[ARGS]{JSON_2}",
    "mistral_list": f"[TOOL_CALLS][{', '.join(objects())}]",
    "granite": f"<|tool_call|>[{', '.join(objects())}]",
    "phi4": f"<|tool_call|>[{', '.join(objects())}]<|/tool_call|>",
    "deepseek_v3": deepseek(f"function{SEPARATOR}", "\n```json\n", "\n```", "\n"),
    "deepseek_v31": deepseek("", SEPARATOR, "", ""),
    "harmony": HARMONY,
}
ALONE = ("llama3_json", "pythonic")
"""Formats without a mark: their calls stand at the answer's beginning."""
FORMATS = pytest.mark.parametrize("name", TOOL_FORMATS)


def read(parser: Parser, text: str, sizes: list[int]) -> list[Event]:
    """Parse text that comes in pieces of these sizes, the last one the rest."""
    found, at = list[Event](), 0
    for size in sizes:
        found += parser.put(text[at : at + size])
        at += size
    return [*found, *parser.put(text[at:]), *parser.rest()]


def summary(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, text, and (name, arguments) of each call."""
    names = [event.name for event in events if isinstance(event, CallBegin)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, CallArguments):
            arguments[event.index] += event.text
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    text = "".join(event.text for event in events if isinstance(event, Text))
    return reasoning, text, list(zip(names, arguments, strict=True))


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in summary(events)[2]]


def parser(name: str, *, parallel: bool = True) -> Parser:
    return TOOL_FORMATS[name].parser(FUNCTIONS, parallel=parallel)


def test_every_format_is_tried() -> None:
    assert WRITTEN.keys() == TOOL_FORMATS.keys()


@FORMATS
def test_two_calls_come_back_whatever_the_pieces(name: str) -> None:
    text = WRITTEN[name]
    for split in range(len(text)):
        events = read(parser(name), text, [split])
        assert calls_of(events) == CALLS, split
        assert summary(events)[1] == "", split
    ids = [event.id for event in read(parser(name), text, [1] * len(text)) if isinstance(event, CallBegin)]
    assert len(set(ids)) == 2


@FORMATS
@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 9), max_size=60))
def test_text_around_calls_is_kept(name: str, sizes: list[int]) -> None:
    before = "" if name in ALONE else "Let me see <b>.\n"
    after = "" if name == "harmony" else "\nThat is it, <end> {of} [it]"
    if name == "harmony":
        before = "<|channel|>final<|message|>Let me see <b>.<|end|><|start|>assistant"
    events = read(parser(name), before + WRITTEN[name] + after, sizes)
    assert calls_of(events) == CALLS
    shown = "Let me see <b>." if before else ""
    assert summary(events)[1].split() == (shown + " " + after).split()


@FORMATS
def test_one_call_ends_the_answer_where_one_is_wanted(name: str) -> None:
    for sizes in ([], [7] * 20, [1] * len(WRITTEN[name])):
        one = parser(name, parallel=False)
        assert calls_of(read(one, WRITTEN[name], sizes)) == CALLS[:1]
        assert one.done


@FORMATS
@pytest.mark.parametrize("size", [1, 1000])
def test_what_is_no_call_of_a_known_function_stays_text(name: str, size: int) -> None:
    unknown = WRITTEN[name].replace("add", "other").replace("now", "none")
    _, text, calls = summary(read(parser(name), unknown, [size] * len(unknown)))
    assert calls == []
    if name == "harmony":  # of its messages the text alone
        assert text == JSON_1 + "\n" + JSON_2
    else:
        assert text == unknown


@FORMATS
@pytest.mark.parametrize("size", [1, 1000])
def test_malformed_output_stays_text_and_a_cut_call_keeps_what_there_is(name: str, size: int) -> None:
    text = WRITTEN[name]
    for end in range(len(text)):
        events = read(parser(name), text[:end], [size] * end)
        calls = summary(events)[2]
        if not calls and name != "harmony":
            assert summary(events)[1] == text[:end]
        for begun, (called, arguments) in zip(calls, CALLS, strict=False):
            assert begun[0] == called
            assert begun[1] in ("", "{") or json.dumps(arguments, ensure_ascii=False).startswith(begun[1][:4])


@cache
def compiler() -> Any:
    """xgrammar's compiler for a vocabulary of bytes."""
    import xgrammar

    info = xgrammar.TokenizerInfo([f"<0x{byte:02X}>" for byte in range(256)] + ["</s>"],
                                  xgrammar.VocabType.BYTE_FALLBACK, stop_token_ids=[256])  # fmt: skip
    return xgrammar.GrammarCompiler(info, max_threads=1)


def matches(grammar: Any, text: str) -> bool:
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiler().compile_grammar(grammar), terminate_without_stop_token=False)
    return matcher.accept_string(text) and matcher.accept_token(256)


def of_tag(form: Any) -> Any:
    import xgrammar

    return xgrammar.Grammar.from_structural_tag(structural_tag(form))


@FORMATS
def test_the_grammar_is_the_format_that_is_read(name: str) -> None:
    form = TOOL_FORMATS[name]
    required = of_tag(form.required(FUNCTIONS, parallel=True))
    assert matches(required, WRITTEN[name])
    assert not matches(required, "Let me see.")
    assert not matches(required, WRITTEN[name].replace("n=3", 'n="3"').replace("3", "true"))
    assert not matches(of_tag(form.required(FUNCTIONS, parallel=False)), WRITTEN[name])
    assert form.strict(FUNCTIONS) is None


@FORMATS
def test_a_strict_function_is_enforced_where_the_model_decides(name: str) -> None:
    form = TOOL_FORMATS[name]
    strict = form.strict((Callable(name="add", schema=SCHEMA, strict=True), NOW))
    assert strict is not None
    before = "" if name in ALONE or name == "harmony" else "Let me see.\n"
    free = of_tag(strict)
    assert matches(free, before + WRITTEN[name])
    assert matches(free, "no call at all")
    assert not matches(free, before + WRITTEN[name].replace("n=3", "n=true").replace("3", "true"))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("hermes", "qwen_3"),
        ("qwen3_coder", "qwen_3_coder"),
        ("deepseek_v3", "deepseek_r1"),
        ("deepseek_v31", "deepseek_v3_1"),
        ("llama3_json", "llama"),
        ("harmony", "harmony"),
    ],
)
def test_xgrammars_own_form_of_a_family_takes_the_example(ours: str, theirs: str) -> None:
    import xgrammar

    tools: Any = [
        {"type": "function", "function": {"name": one.name, "parameters": one.schema, "strict": True}}
        for one in FUNCTIONS
    ]
    tag = xgrammar.get_model_structural_tag(theirs, tools=tools, tool_choice="required", reasoning="disabled")
    text = WRITTEN[ours]
    if ours == "harmony":  # each message ends for itself there
        text = text.replace(" <|constrain|>", "<|constrain|>").replace("<|end|>", "<|call|>") + "<|call|>"
    assert matches(xgrammar.Grammar.from_structural_tag(tag), text)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        (
            "hermes",
            '<tool_call>{"arguments": "{\\"zone\\": \\"x\\"}", "name": "now"}</tool_call>',
            {"zone": "x"},
        ),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', {}),
        (
            "hermes",
            '<tool_call>[{"name": "now", "arguments": {"zone": "a\nb"}}]</tool_call>',
            {"zone": "a\nb"},
        ),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"zone": "x"}}', {"zone": "x"}),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {"zone": "x"}}', {"zone": "x"}),
        ("llama3_json", 'Well: <|python_tag|>{"name": "now", "parameters": {}}', {}),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "now", "arguments": {"zone": "x"}, "id": "abcdefghi"}]',
            {"zone": "x"},
        ),
        ("mistral", '[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{"zone": "x"}', {"zone": "x"}),
        ("mistral_list", '[TOOL_CALLS]now{"zone": "x"}', {"zone": "x"}),
        ("phi4", 'functools[{"name": "now", "arguments": {"zone": "x"}}]', {"zone": "x"}),
        ("phi4", '<|tool_call|>{"name": "now", "arguments": {"zone": "x"}}<|/tool_call|>', {"zone": "x"}),
        ("granite", ' <|tool_call|> [{"arguments": {"zone": "x"}, "name": "now"}]', {"zone": "x"}),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", {}),
        ("qwen3_coder", "<tool_call><function=now><parameter=zone>\nx</function></tool_call>", {"zone": "x"}),
        (
            "qwen3_coder",
            "<tool_call>\n<function=now>\n<parameter=zone>\nif a < 1:\n  </b>\n\n</parameter>\n</function>\n"
            "</tool_call>",
            {"zone": "if a < 1:\n  </b>\n"},
        ),
        ("glm4", "<tool_call>now</tool_call>", {}),
        (
            "glm4",
            "<tool_call>now<arg_key>zone</arg_key><arg_value>null</arg_value></tool_call>",
            {"zone": "null"},
        ),
        ("pythonic", "<|python_start|>[now(zone='it\\'s')]<|python_end|>", {"zone": "it's"}),
        ("pythonic", "[now(zone=null)]", {"zone": None}),
        ("olmo3", "<function_calls>now(zone='''x''')</function_calls>", {"zone": "x"}),
        (
            "harmony",
            ' to=functions.now<|channel|>commentary json<|message|>{"zone": "x"}<|call|>',
            {"zone": "x"},
        ),
        ("deepseek_v31", f'{CALLS_BEGIN}{CALL_BEGIN}now{SEPARATOR}{{"zone": "x"}}{CALL_END}', {"zone": "x"}),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_other_spellings_of_a_format_are_read(name: str, text: str, arguments: Any, size: int) -> None:
    events = read(parser(name), text, [size] * len(text))
    assert calls_of(events) == [("now", arguments)]
    assert summary(events)[1] in ("", "Well:", "Well: ")


@pytest.mark.parametrize("wrong", ["<parameter=\n>7", "<parameter=n: [7]\n", "<parameter=n=>7"])
@pytest.mark.parametrize("size", [1, 1000])
def test_an_element_that_is_no_argument_ends_the_call_with_valid_json(wrong: str, size: int) -> None:
    good = "<tool_call>\n<function=add>\n<parameter=s>\nx\n</parameter>\n"
    text = f"{good}{wrong}</parameter>\n</function>\n</tool_call> and more"
    events = read(parser("qwen3_coder"), text, [size] * len(text))
    assert calls_of(events) == [("add", {"s": "x"})]
    assert summary(events)[1].startswith(wrong.split(">")[0])
    assert summary(events)[1].endswith(" and more")


def test_arguments_are_streamed_as_they_are_written() -> None:
    hermes = TOOL_FORMATS["hermes"].parser([ADD])
    begun = hermes.put('<tool_call>\n{"name": "add", "arguments": {"a')
    assert isinstance(begun[0], CallBegin)
    assert begun[1:] == [CallArguments(0, '{"a')]
    assert hermes.put('": 1') == [CallArguments(0, '": 1')]
    assert hermes.put("}}\n</tool_call>") == [CallArguments(0, "}")]
    coder = TOOL_FORMATS["qwen3_coder"].parser([ADD])
    assert len(coder.put("<tool_call>\n<function=add>\n<parameter=n>\n1\n</parameter>\n")) == 2


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "integer"}, " 1 ", 1),
        ({"type": "integer"}, "one", "one"),
        ({"type": "number"}, "1", 1),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "1", "1"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "1", 1),
        ({"$ref": "#/$defs/rows"}, "[1]", [1]),
        ({"$ref": "#/$defs/loop"}, "[1]", [1]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        (None, '{"a": 1}', {"a": 1}),
        (None, "plain", "plain"),
        ({}, '"quoted"', '"quoted"'),
        ({"type": "array"}, "[1, ", "[1, "),
        ({"type": "string", "enum": ["C"]}, "\n C", "C"),
        ({"enum": ["C"]}, "C\n", "C"),
        ({"type": "string"}, "\n C", "\n C"),
    ],
)
def test_values_without_quotes_have_the_schemas_type(schema: Any, text: str, value: Any) -> None:
    from torchwright.serve.grammar.values import value_of

    root = {"$defs": {"rows": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert value_of(text, schema, root) == value


THOUGHT, ANSWER = "First <b>, then\n\nthis {x}", "The answer.\n\nIt is </b> 3."
AROUND = {"granite": ("<response>", "</response>"), "hunyuan": ("\n<answer>\n", "\n</answer>")}


def reasoned(name: str) -> str:
    form = REASONING_FORMATS[name]
    if name == "harmony":
        analysis = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
        return f"{analysis}<|channel|>final<|message|>{ANSWER}"
    begin, end = AROUND.get(name, ("", ""))
    return f"{form.begin}\n{THOUGHT}\n{form.end}\n\n{begin}{ANSWER}{end}"


def answer_form(name: str | None, tools: str = "hermes", functions: Any = ()) -> AnswerForm:
    return AnswerForm(
        reasoning=REASONING_FORMATS[name] if name else None, tools=TOOL_FORMATS[tools], functions=functions
    )


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_is_parted_from_the_answer_whatever_the_pieces(name: str) -> None:
    text = reasoned(name)
    for split in range(len(text)):
        assert summary(read(answer_form(name).parser("none"), text, [split])) == (THOUGHT, ANSWER, [])
    assert summary(read(answer_form(name).parser("none"), text, [1] * len(text))) == (THOUGHT, ANSWER, [])


@pytest.mark.parametrize("name", [name for name in REASONING_FORMATS if name != "harmony"])
def test_reasoning_that_the_prompt_has_opened(name: str) -> None:
    form = REASONING_FORMATS[name]
    assert form.prompt_end(f"user: hi\nassistant: {form.begin}\n") == "open"
    assert form.prompt_end(f"assistant: {form.begin}\n\n{form.end}\n\n") == "closed"
    assert form.prompt_end("assistant: ") == "none"
    bare = reasoned(name).removeprefix(form.begin)
    for text in (bare, reasoned(name)):  # some models write the mark again
        assert summary(read(answer_form(name).parser("open"), text, [3] * 9)) == (THOUGHT, ANSWER, [])
    cut = bare.partition(form.end)[0]
    assert summary(read(answer_form(name).parser("open"), cut, [2] * 40)) == (THOUGHT, "", [])


@pytest.mark.parametrize(
    ("prompt_end", "text"),
    [
        ("none", "A model marks its thoughts with <think> and </think>."),
        ("closed", "plain </think> text"),
        ("none", "  <thin"),
    ],
)
def test_marks_within_an_answer_are_text(prompt_end: PromptEnd, text: str) -> None:
    assert summary(read(answer_form("think").parser(prompt_end), text, [1] * 80)) == ("", text, [])


@FORMATS
def test_calls_after_reasoning(name: str) -> None:
    reasoning = "harmony" if name == "harmony" else "think"
    thought = "I could write <tool_call> {"
    text = f"<think>\n{thought}\n</think>\n\n{WRITTEN[name]}"
    if name == "harmony":
        text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{WRITTEN[name]}"
    form = answer_form(reasoning, name, FUNCTIONS)
    for sizes in ([], [1] * len(text), [5] * 30):
        events = read(form.parser("none"), text, sizes)
        assert (summary(events)[:2], calls_of(events)) == ((thought, ""), CALLS)


def test_a_parser_says_when_it_reads_reasoning() -> None:
    opened = answer_form("think").parser("open")
    assert opened.reasoning
    opened.put("hm</think>")
    assert not opened.reasoning
    harmony = answer_form("harmony").parser("none")
    harmony.put("<|channel|>analysis<|message|>hm")
    assert harmony.reasoning
    harmony.put("<|end|>")
    assert not harmony.reasoning


def test_templates_show_the_format() -> None:
    assert tool_format_of("no tools").name == "hermes"
    for name, hint in {
        "hermes": "<tool_call>{'name'",
        "llama3_json": "<|python_tag|>",
        "pythonic": "[func_name1(params_name1=params_value1)]",
        "qwen3_coder": "<tool_call>\n<function=example>",
        "glm4": "<tool_call>{name}\n<arg_key>",
        "mistral": "[TOOL_CALLS]' + name + '[ARGS]",
        "mistral_list": "[TOOL_CALLS] [",
        "granite": "<|tool_call|> followed by a list",
        "phi4": "<|tool|>{}<|/tool|>",
        "deepseek_v3": "<｜tool▁calls▁begin｜>…```json",
        "deepseek_v31": "<｜tool▁calls▁begin｜>",
        "harmony": "<|channel|>final",
        "seed_oss": "<seed:tool_call>\n<function=",
        "olmo3": "<function_calls>",
    }.items():
        assert tool_format_of(hint).name == name
    for text, reasoning in {
        "<think>": "think",
        "content.split('</think>')": "think",
        "<think></think><response>": "granite",
        "<seed:think>": "seed_oss",
        "[THINK]": "magistral",
        "<|channel|>": "harmony",
    }.items():
        form = reasoning_format_of(text)
        assert form is not None
        assert form.name == reasoning
    assert reasoning_format_of("none") is None
    by_token = reasoning_format_of("none", {"<think>", "</think>"})
    assert by_token is not None
    assert by_token.name == "think"
    assert by_token.prefix("none") == []
    assert by_token.prefix("open")
