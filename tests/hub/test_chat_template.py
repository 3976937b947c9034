"""A folder's chat templates: where they are found, and the forms of messages that each is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchwright.hub.chat_template import ChatTemplate, TemplateRefused

SIMPLE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + '' }}{% endfor %}"
TILDE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
PARTS = """\
{%- for m in messages %}[{{ m.role }}]
{%- if m.content is string %}{{ m.content }}
{%- elif m.content is not none %}
{%- for part in m.content if part.type == 'text' %}<{{ part.text }}>{% endfor %}
{%- endif %}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}"""
USER_PARTS = """\
{%- for m in messages %}[{{ m.role }}]
{%- if m.role == 'user' and m.content is not string %}{{ m.content | map(attribute='text') | join('+') }}
{%- else %}{{ m.content | trim }}{% endif %}
{%- endfor %}"""
TEXT_ARGUMENTS = """\
{%- for m in messages %}[{{ m.role }}]{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '<' + call.function.arguments + '>' }}{% endfor %}
{%- endfor %}"""
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}],
}
HI = {"role": "user", "content": "hi"}


def template(folder: Path, source: Any = None, **files: str) -> ChatTemplate:
    """A folder with `chat_template` in tokenizer_config.json, and with files."""
    settings = {} if source is None else {"chat_template": source}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        path = folder / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return ChatTemplate(folder)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_a_template_for_tools_is_read_from_the_folder_of_additional_templates(tmp_path: Path) -> None:
    found = template(
        tmp_path, chat_template="plain", **{"additional_chat_templates/tool_use": "with {{ tools }}"}
    )
    assert sorted(found.sources) == ["default", "tool_use"]
    assert found.render([HI]) == "plain"
    assert found.render([HI], tools=[{"a": 1}]) == "with [{'a': 1}]"
    assert found.takes_tools


def test_templates_by_name_are_read_from_the_settings_and_files_go_before_them(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    assert template(tmp_path, listed).render([HI], tools=[{}]) == "two"
    found = template(tmp_path, listed, **{"additional_chat_templates/tool_use": "three"})
    assert found.render([HI], tools=[{}]) == "three"
    assert found.render([HI]) == "one"


def test_named_templates_without_a_default_are_refused_as_transformers_does(tmp_path: Path) -> None:
    found = template(
        tmp_path, **{"additional_chat_templates/rag": "x", "additional_chat_templates/tool_use": "y"}
    )
    assert found.render([HI], tools=[{}]) == "y"
    with pytest.raises(TemplateRefused, match="no default chat template, only rag, tool_use"):
        found.render([HI])


def test_parts_are_left_to_templates_that_read_them_and_are_lines_of_text_for_others(tmp_path: Path) -> None:
    conversation = [
        {"role": "system", "content": parts("s", "t")},
        {"role": "user", "content": parts("a", "b")},
    ]
    assert template(tmp_path, PARTS).render(conversation) == "[system]<s><t>[user]<a><b>"
    assert template(tmp_path, SIMPLE).render(conversation) == "[system]s\nt[user]a\nb"
    assert template(tmp_path, TILDE).render(conversation) == "[system]s\nt[user]a\nb"
    assert template(tmp_path, USER_PARTS).render(conversation) == "[system]s\nt[user]a+b"
    pictures = [{"role": "user", "content": [*parts("a"), {"type": "image"}]}]
    assert template(tmp_path, PARTS).render(pictures) == "[user]<a>"


def test_null_stays_null_unless_the_template_fails_on_it_or_writes_it(tmp_path: Path) -> None:
    asks = "{% for m in messages %}[{{ m.content is none }}]{% endfor %}"
    assert template(tmp_path, asks).render([HI, CALL]) == "[False][True]"
    assert template(tmp_path, PARTS).render([HI, CALL]) == '[user]hi[assistant]f{"x": "é"}'
    assert template(tmp_path, SIMPLE).render([HI, CALL]) == "[user]hi[assistant]"
    assert template(tmp_path, TILDE).render([HI, CALL]) == "[user]hi[assistant]"


def test_arguments_are_text_for_a_template_that_knows_no_objects(tmp_path: Path) -> None:
    assert template(tmp_path, TEXT_ARGUMENTS).render([HI, CALL]) == '[user]hi[assistant]<{"x": "é"}>'


def test_messages_are_not_changed(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": parts("a")}, CALL]
    before = json.dumps(messages)
    template(tmp_path, TILDE).render(messages)
    assert json.dumps(messages) == before


def test_what_a_template_does_to_lists_it_does_not_have_is_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(TemplateRefused):
        template(tmp_path, "{{ messages[5].content.x[2] }}{{ [][1] + 1 }}").render([HI])


def test_a_text_is_a_part_for_a_template_that_knows_parts_alone(tmp_path: Path) -> None:
    """LLaVA's templates read lists alone, and wrote nothing of a plain text."""
    source = (
        "{% for message in messages %}[{{ message.role }}]"
        "{% for part in message.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
        "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
        "{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(source)
    parts = [{"type": "text", "text": "b"}, {"type": "image"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    found = ChatTemplate(tmp_path).render([{"role": "system", "content": "a"}, *messages])
    assert found == "[system]a[user]<image>b[assistant]c"
