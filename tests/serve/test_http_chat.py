"""Chat templates: the model's own in a sandbox, and the plain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchwright.core.errors import ModelError
from torchwright.hub.chat_template import ChatTemplate
from torchwright.serve.api_error import ApiError
from torchwright.serve.formats.tools import tool_format_of
from torchwright.serve.openai.conversation import Tools, prompt_text
from torchwright.serve.openai.parts import CalledFunction, Function, Message, TextPart, ToolCall

HELLO = [{"role": "user", "content": "hi"}]


def folder(tmp_path: Path, template: Any = None, **settings: Any) -> Path:
    if template is not None:
        settings["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_model_without_a_template_gets_the_plain_one(tmp_path: Path) -> None:
    template = ChatTemplate(tmp_path)
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "ho"},
        *HELLO,
    ]
    assert template.render(messages) == (
        "System: Be brief.\n\nUser: hi\n\nAssistant: ho\n\nUser: hi\n\nAssistant:"
    )
    assert template.render(HELLO, add_generation_prompt=False) == "User: hi\n\n"
    assert template.stops == ("\nUser:",)
    assert tool_format_of("".join(template.sources.values())).name == "hermes"


def test_the_plain_template_shows_tools_and_calls(tmp_path: Path) -> None:
    call = ToolCall(id="c", function=CalledFunction(name="add", arguments='{"a": 1}'))
    messages = [
        Message(role="developer", content=[TextPart(type="text", text="a"), TextPart(type="text", text="b")]),
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", tool_call_id="c", content="2"),
    ]
    asked = Tools(functions=[Function(name="add", strict=True)], choice="auto")
    text = prompt_text(ChatTemplate(tmp_path), messages, asked)
    assert '{"type": "function", "function": {"name": "add"}}\n' in text
    assert (
        'System: a\nb\n\nAssistant: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    )
    assert text.endswith("Tool: 2\n\nAssistant:")


def test_the_models_own_template_is_found_wherever_it_is(tmp_path: Path) -> None:
    folder(tmp_path, "one {{ bos_token }}", bos_token={"content": "<s>"})
    assert ChatTemplate(tmp_path).render(HELLO) == "one <s>"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "two"}))
    assert ChatTemplate(tmp_path).render(HELLO) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert ChatTemplate(tmp_path).render(HELLO) == "three"
    assert ChatTemplate(tmp_path).stops == ()


def test_one_of_several_templates_is_for_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    template = ChatTemplate(folder(tmp_path, named))
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{}, {}]) == "2"


def test_templates_have_what_transformers_gives_them(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ extra }}"
    )
    template = ChatTemplate(folder(tmp_path, source))
    assert template.render([{"role": "user", "content": "<é>"}] * 2, extra={"extra": "!"}) == '"<é>"4!'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{% include 'x' %}", "loader"),
        ("{{ 'x'.attr(3) }}", "attr"),
    ],
)
def test_what_a_template_may_not_do_is_a_400(tmp_path: Path, source: str, words: str) -> None:
    template = ChatTemplate(folder(tmp_path, source))
    with pytest.raises(ApiError) as found:
        prompt_text(template, [Message(role="user", content="hi")], Tools(functions=[], choice="none"))
    assert found.value.status == 400
    assert words in found.value.message


def test_a_template_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be parsed"):
        ChatTemplate(folder(tmp_path, "{% if %}"))
    with pytest.raises(ModelError, match="cannot be used"):
        ChatTemplate(folder(tmp_path, 5))


def test_tools_need_a_place_in_the_template(tmp_path: Path) -> None:
    template = ChatTemplate(folder(tmp_path, "{{ messages[0].content }}"))
    message = [Message(role="user", content="hi")]
    with pytest.raises(ApiError, match="no place for tools"):
        prompt_text(template, message, Tools(functions=[Function(name="add")], choice="auto"))
    assert prompt_text(template, message, Tools(functions=[Function(name="add")], choice="none")) == "hi"
