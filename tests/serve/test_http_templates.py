"""Chat templates with the constructs that published models' templates are made of, written anew, beside transformers.

Each is rendered through the server's own path, from a request's messages to the text, and by transformers on the same
messages: the texts are the same, and so is what is refused.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from torchwright.hub.chat_template import ChatTemplate
from torchwright.serve.api_error import ApiError
from torchwright.serve.formats.base import Callable
from torchwright.serve.formats.reader import CallBegin
from torchwright.serve.formats.tools import HERMES, tool_format_of
from torchwright.serve.openai.conversation import Tools, prompt_text
from torchwright.serve.openai.parts import Function, Message

# Marked roles, a default system message, calls as JSON between tags, and tool results gathered into one user message by
# looking at the neighbours: as Qwen 2.5 and Hermes have it.
TAGGED = """\
{%- if tools %}
{{- '<|start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'Be useful.' }}{%- endif %}
{{- '\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nAnswer a call as <tool_call> and an object.<|stop|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|start|>system\\n' + messages[0].content + '<|stop|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
    or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|start|>' + message.role + '\\n' + message.content + '<|stop|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|stop|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|stop|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""

# A namespace that is found walking backwards, thoughts that are cut from earlier turns, a switch: as Qwen 3.
THINKING = """\
{%- set found = namespace(looking=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
{%- set place = (messages | length - 1) - loop.index0 %}
{%- if found.looking and message.role == 'user' and message.content is string
    and not (message.content.startswith('<result>') and message.content.endswith('</result>')) %}
{%- set found.looking = false %}{%- set found.last = place %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' %}
{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > found.last and (loop.last or thought) %}
{{- '[assistant]<think>' + thought.strip('\\n') + '</think>' + content }}
{%- else %}{{- '[assistant]' + content }}{%- endif %}
{%- else %}{{- '[' ~ message.role ~ ']' ~ content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '[assistant]' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}"""

# Defaults for what a caller leaves undefined, today's date, tools in the first user message, one call for each message,
# results as JSON: as Llama 3.
DATED = """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}
{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}
{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<h>system</h>Today: ' + date_string + '\\n' + system + '<e>' }}
{%- if tools_in_user_message and tools is not none %}
{%- if messages | length == 0 %}{{- raise_exception('no first user message') }}{%- endif %}
{%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{{- '<h>user</h>Answer as {"name": NAME, "parameters": OBJECT}\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{{- first + '<e>' }}
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<h>' + message['role'] + '</h>' + message['content'] | trim + '<e>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<h>assistant</h>{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<e>' }}
{%- else %}
{{- '<h>ipython</h>' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- '<e>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<h>assistant</h>' }}{%- endif %}"""

# Turns that must alternate and no system message: as Gemma.
STRICT = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<turn>' + role + '\\n' + message['content'] | trim + '</turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""

# Filters on the whole list, tools before the last user message, ids that must have nine characters: as Mistral.
CHECKED = """\
{%- set turns = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set others = messages | rejectattr('role', 'in', ['user', 'assistant', 'tool']) | map(attribute='content') %}
{{- bos_token ~ others | join('|') }}
{%- set ns = namespace(index=0) %}
{%- for message in messages if message.role in ['user', 'assistant', 'tool'] %}
{%- if message.role == 'user' %}
{%- set ns.index = ns.index + 1 %}
{%- if tools is not none and message == turns[-1] %}
{{- '[TOOLS][' }}
{%- for tool in tools %}
{%- for key, value in tool.function.items() if value is not mapping %}{{- key ~ '=' ~ value ~ ';' }}{%- endfor %}
{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ']' }}
{%- endif %}
{{- '[INST]' + message['content'] + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
{{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' }}
{%- endfor %}
{{- eos_token }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
{%- else %}{{- '[RESULT]' ~ {'content': message.content, 'call_id': message.tool_call_id} | tojson }}
{%- endif %}
{%- endfor %}
{{- '#%d' | format(ns.index) }}"""

# A macro that calls itself for a schema's parts, and `items`: as Hermes and the larger Llama templates.
RECURSIVE = """\
{%- macro kind(part) %}
{%- if part.type == 'array' %}{{- 'list[' + kind(part['items']) + ']' }}
{%- elif part.type == 'object' %}
{%- set ns = namespace(parts=[]) %}
{%- for name, one in part.properties | dictsort %}
{%- set ns.parts = ns.parts + [name ~ ': ' ~ kind(one)] %}
{%- endfor %}
{{- '{' ~ ns.parts | join(', ') ~ '}' }}
{%- elif part.enum is defined %}{{- part.enum | join('|') }}
{%- else %}{{- part.type }}{%- endif %}
{%- endmacro %}
{%- for tool in tools or [] %}{{- tool.function.name ~ kind(tool.function.parameters) ~ '\\n' }}{%- endfor %}
{%- for message in messages recursive %}
{{- message.role ~ ': ' ~ message.content | e | replace('\\n', ' ') }}
{%- endfor %}"""

ADD = Function(
    name="add",
    description="Adds – “exactly”",
    parameters={
        "type": "object",
        "properties": {
            "rows": {"type": "array", "items": {"type": "integer"}},
            "sign": {"type": "string", "enum": ["+", "-"]},
        },
    },
)


def call(id: str, arguments: str = '{"rows": [1, 2], "sign": "é"}') -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}


ASK: dict[str, Any] = {"role": "user", "content": " What is 1 + 2? <b> "}
SYSTEM = {"role": "system", "content": "Be brief."}
STEPS = [
    ASK,
    {"role": "assistant", "tool_calls": [call("abc123XYZ")]},
    {"role": "tool", "tool_call_id": "abc123XYZ", "content": "3"},
]
TWO = [
    ASK,
    {"role": "assistant", "content": "Twice.", "tool_calls": [call("abc123XYZ"), call("abc123XYW")]},
    {"role": "tool", "tool_call_id": "abc123XYZ", "content": "3"},
    {"role": "tool", "tool_call_id": "abc123XYW", "content": "4"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n7"},
    {"role": "user", "content": "<result>7</result>"},
    {"role": "assistant", "content": "<think>so</think>Yes."},
    {"role": "user", "content": "And?"},
]
SEPARATE: list[dict[str, Any]] = [
    ASK,
    {**TWO[1], "tool_calls": [call("abc123XYZ")]},
    TWO[2],
    {"role": "assistant", "tool_calls": [call("abc123XYW")]},
    *TWO[3:],
]
"""The same, with one call in each message."""
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [ASK],
    "with a system message": [SYSTEM, ASK, {"role": "assistant", "content": " 3 "}, ASK],
    "a tool's result": [SYSTEM, *STEPS],
    "two calls, two results, thoughts": TWO,
    "two questions": [ASK, ASK],
}
TEMPLATES = {
    "tagged": TAGGED,
    "thinking": THINKING,
    "dated": DATED,
    "strict": STRICT,
    "checked": CHECKED,
    "recursive": RECURSIVE,
}


def template(tmp_path: Path, source: str) -> ChatTemplate:
    settings = {"chat_template": source, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatTemplate(tmp_path)


def by_transformers(
    source: str, messages: list[dict[str, Any]], empty: str | None = None, **variables: Any
) -> str | None:
    """What transformers makes of the messages, with arguments as objects; None where the template refuses."""
    plain = json.loads(json.dumps(messages))
    for message in plain:
        message.setdefault("content", empty)
        for one in message.get("tool_calls", []):
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    try:
        texts, _ = render_jinja_template(
            conversations=[plain],
            chat_template=source,
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="</s>",
            **variables,
        )
    except TemplateError:
        return None
    return texts[0]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [False, True], ids=["", "tools"])
def test_a_prompt_is_the_one_that_transformers_makes(
    tmp_path: Path, name: str, conversation: str, tools: bool
) -> None:
    messages, source = CONVERSATIONS[conversation], TEMPLATES[name]
    ours = template(tmp_path, source)
    described = [{"type": "function", "function": ADD.model_dump(exclude_none=True)}] if tools else None
    # Where a template writes null as "None", the server gives it an empty text.
    empty = None if ours.form("default").null else ""
    expected = by_transformers(source, messages, empty, tools=described)
    asked = Tools(functions=[ADD] if tools else [], choice="auto" if tools else "none")
    checked = [Message.model_validate(message) for message in messages]
    if expected is None and name == "dated":  # it takes one call a message, and its result behind it
        expected = by_transformers(source, SEPARATE, empty, tools=described)
    if expected is None or (tools and not ours.takes_tools):  # where transformers would drop the tools
        with pytest.raises(ApiError) as refused:
            prompt_text(ours, checked, asked)
        assert refused.value.status == 400
        return
    assert prompt_text(ours, checked, asked) == expected


def test_what_the_templates_are_meant_to_exercise(tmp_path: Path) -> None:
    """The comparison above would hold for templates that do nothing, too."""
    ask = [Message.model_validate(message) for message in CONVERSATIONS["two calls, two results, thoughts"]]
    none, tools = Tools(functions=[], choice="none"), Tools(functions=[ADD], choice="auto")
    tagged = prompt_text(template(tmp_path, TAGGED), ask, tools)
    assert "Adds – “exactly”" in tagged
    assert tagged.count("<tool_response>") == 2
    assert tagged.count("<|start|>user") == 4
    thinking = template(tmp_path, THINKING)
    assert "hm" not in prompt_text(thinking, ask, none)
    assert prompt_text(thinking, ask, none, extra={"enable_thinking": False}).endswith("<think></think>")
    dated = template(tmp_path, DATED)
    assert datetime.now().strftime("%Y") in prompt_text(dated, ask[:1], none)
    assert "Today: x\n" in prompt_text(dated, ask[:1], none, extra={"date_string": "x"})
    with pytest.raises(ApiError, match="System role not supported"):
        prompt_text(template(tmp_path, STRICT), [Message(role="system", content="x"), *ask], none)
    shape = "add{rows: list[integer], sign: +|-}\n"
    assert prompt_text(template(tmp_path, RECURSIVE), ask, tools).startswith(shape)
    assert [tool_format_of(source).name for source in (TAGGED, DATED)] == ["hermes", "llama3_json"]


# One system message, and only at the beginning: as Qwen 3.5.
SYSTEM_FIRST = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{- raise_exception('System message must be first') }}{%- endif %}
{{- '[' + message.role + ']' + message.content }}
{%- endfor %}"""
LATE = {"role": "system", "content": [{"type": "text", "text": "New"}, {"type": "text", "text": "tools."}]}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM, SYSTEM, ASK], "[system]Be brief.\n\nBe brief.[user]"),
        ([{**SYSTEM, "role": "developer"}, ASK, LATE, ASK], "[system]Be brief.\n\nNew\ntools.[user]"),
        ([ASK, SYSTEM], "[system]Be brief.[user]"),
    ],
)
def test_system_messages_are_joined_where_the_template_takes_one(
    tmp_path: Path, messages: list[dict[str, Any]], expected: str
) -> None:
    checked = [Message.model_validate(message) for message in messages]
    none = Tools(functions=[], choice="none")
    assert prompt_text(template(tmp_path, SYSTEM_FIRST), checked, none).startswith(expected)
    # Elsewhere they stay where they are, as transformers renders them.
    open_to_all = SYSTEM_FIRST.replace("and not loop.first", "and false")
    assert not prompt_text(template(tmp_path, open_to_all), checked, none).startswith(expected)


def test_a_template_that_takes_no_system_message_refuses_joined_ones(tmp_path: Path) -> None:
    checked = [Message.model_validate(message) for message in (SYSTEM, SYSTEM, ASK)]
    with pytest.raises(ApiError, match="System role not supported"):
        prompt_text(template(tmp_path, STRICT), checked, Tools(functions=[], choice="none"))


# One call a message, whose thoughts are its content or its `thinking`: as gpt-oss.
ANALYSIS = """\
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}{{- raise_exception('content or thinking') }}{%- endif %}
{{- '[analysis]' ~ (message.content or message.thinking) }}
{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call') }}{%- endif %}
{{- '[call]' ~ message.tool_calls[0].id }}
{%- elif message.role == 'system' and not loop.first %}{{- raise_exception('system first') }}
{%- else %}{{- '[' ~ message.role ~ ']' ~ message.content }}{%- endif %}
{%- endfor %}"""


@pytest.mark.parametrize(("ids", "systems"), [("a", 0), ("ab", 0), ("ab", 2)])
def test_an_answer_of_thoughts_text_and_calls_can_be_sent_back(
    tmp_path: Path, ids: str, systems: int
) -> None:
    """llama.cpp#17040: a template that takes less refused the conversation from then on."""
    answer = {
        "role": "assistant",
        "content": "I add.",
        "reasoning_content": "Hm",
        "tool_calls": [*map(call, ids)],
    }
    results = [{"role": "tool", "tool_call_id": id, "content": id.upper()} for id in reversed(ids)]
    checked = [Message.model_validate(each) for each in [ASK, *[SYSTEM] * systems, answer, *results, ASK]]
    text = prompt_text(template(tmp_path, ANALYSIS), checked, Tools(functions=[], choice="none"))
    later = "" if ids == "a" else "[analysis][call]b[tool]B"
    assert f"[analysis]Hm\n\nI add.[call]a[tool]A{later}[user]" in text
    assert text.startswith("[system]" if systems else "[user]")


def test_results_of_no_known_call_stay_behind_the_calls(tmp_path: Path) -> None:
    stray = {"role": "tool", "tool_call_id": "other", "content": "x"}
    checked = [Message.model_validate(each) for each in [*TWO[:2], stray, *TWO[2:4]]]
    text = prompt_text(template(tmp_path, DATED), checked, Tools(functions=[], choice="none"))
    assert text.count('"name": "add"') == 2
    assert text.index('"3"<e>') < text.index('"4"<e>') < text.index('"x"<e>')


def test_a_calls_id_can_be_sent_back(tmp_path: Path) -> None:
    (begun,) = [
        event
        for event in HERMES.parser([Callable(name="add")]).put('<tool_call>{"name": "add", "arguments": {')
        if isinstance(event, CallBegin)
    ]
    assert re.fullmatch("[A-Za-z0-9]{9}", begun.id)
    messages = [ASK, {"role": "assistant", "tool_calls": [call(begun.id)]}]
    checked = [Message.model_validate(message) for message in messages]
    ours = template(tmp_path, CHECKED)
    assert f'"id": "{begun.id}"' in prompt_text(ours, checked, Tools(functions=[], choice="none"))
