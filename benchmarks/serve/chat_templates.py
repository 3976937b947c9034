"""Compare chat templates with transformers: `python -m benchmarks.serve.chat_templates FOLDER` of *.jinja files.

Each template renders fifteen conversations as a client of the server sends them. Ours go through the server's own path.
transformers gets what its documentation asks for: arguments as objects, and, for templates that do not read parts or
null, content as text. The texts must be identical, or the server refuses in words.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import run
from torchwright.core.errors import ModelError
from torchwright.hub.chat_template import ChatTemplate
from torchwright.hub.content_form import fitted_message
from torchwright.serve.api_error import ApiError
from torchwright.serve.openai.conversation import Tools, prompt_text
from torchwright.serve.openai.parts import Function, Message

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Say the weather – “now” & here.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "A city's name"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city"],
    },
}
CLOCK: dict[str, Any] = {
    "name": "now",
    "description": "Say the time.",
    "parameters": {"type": "object", "properties": {}},
}


def call(id: str, name: str = "get_weather", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def result(id: str, content: Any = '{"sky": "clear", "degrees": 21}') -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


ASK = {"role": "user", "content": "How is the weather in Łódź?"}
HI = {"role": "user", "content": '  Hi <b>there</b> & "you"\n'}
HELLO = {"role": "assistant", "content": "Hello."}
SYSTEM = {"role": "system", "content": "Be brief."}
CALLS = {"role": "assistant", "content": None, "tool_calls": [call("abcdef123", city="Łódź", days=[1, 2])]}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "one question": ([HI], []),
    "with a system message": ([SYSTEM, HI], []),
    "three turns": ([SYSTEM, HI, HELLO, ASK], []),
    "the developer's message": ([{"role": "developer", "content": "Be kind."}, HI], []),
    "parts of a question": ([{"role": "user", "content": parts("One.", "Two?")}], []),
    "parts everywhere": (
        [{**SYSTEM, "content": parts("Be brief.")}, HI, {**HELLO, "content": parts("Hello", "you")}, HI], []),
    "an empty question": ([SYSTEM, {"role": "user", "content": ""}], []),
    "thoughts before an answer": ([HI, {**HELLO, "reasoning_content": "They greet.\nSo do I."}, ASK], []),
    "thoughts in an answer": ([HI, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."}, ASK], []),
    "tools and a question": ([ASK], [WEATHER, CLOCK]),
    "a call and its result": ([SYSTEM, ASK, CALLS, result("abcdef123")], [WEATHER]),
    "a call, its result and an answer": (
        [ASK, CALLS, result("abcdef123"), {"role": "assistant", "content": "Clear."}, HI], [WEATHER, CLOCK]),
    "two calls in one message": (
        [ASK, {**CALLS, "content": "See.", "tool_calls": [call("abcdef123", city="Oslo"), call("abcdef124", "now")]},
         result("abcdef123"), result("abcdef124", "12:00")], [WEATHER, CLOCK]),
    "a result in parts": ([ASK, CALLS, result("abcdef123", parts("clear"))], [WEATHER]),
    "a call whose tools are gone": ([ASK, CALLS, result("abcdef123"), HELLO, HI], []),
}  # fmt: skip


def ours(
    template: ChatTemplate, messages: list[dict[str, Any]], functions: list[dict[str, Any]]
) -> str | ApiError:
    """Return the prompt of the server."""
    asked = Tools(
        functions=[Function.model_validate(one) for one in functions], choice="auto" if functions else "none"
    )
    try:
        return prompt_text(template, [Message.model_validate(one) for one in messages], asked)
    except ApiError as refused:
        return refused


def theirs(
    template: ChatTemplate, messages: list[dict[str, Any]], functions: list[dict[str, Any]]
) -> str | Exception:
    """Return the prompt of transformers."""
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template

    name = "tool_use" if functions and "tool_use" in template.sources else "default"
    form = dataclasses.replace(template.form(name), objects=True)
    plain = [fitted_message(message, form, {}) for message in copy.deepcopy(messages)]
    for message in plain:
        if message["role"] == "developer" and not template.knows_developers:
            message["role"] = "system"
        for one in message.get("tool_calls", []):
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    tools = [{"type": "function", "function": one} for one in functions] or None
    try:
        texts, _ = render(
            [plain], chat_template=template.sources[name], tools=tools, add_generation_prompt=True, **SPECIAL
        )
    except Exception as error:  # whatever a template raises
        return error
    return texts[0]


def outcome(one: str | ApiError, two: str | Exception, template: ChatTemplate, functions: object) -> str:
    if isinstance(one, str):
        return (
            "identical" if one == two else "DIFFERENT" if isinstance(two, str) else "only transformers fails"
        )
    if isinstance(two, Exception):
        return "both refuse"
    return "no place for tools" if functions and not template.takes_tools else "ONLY WE REFUSE"


def main() -> None:
    folder = Path(run.options(__doc__, "folder", json=False).folder)
    counts: dict[str, Counter[str]] = {name: Counter() for name in CONVERSATIONS}
    files = sorted(folder.glob("*.jinja"))
    read = 0
    for file in files:
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "chat_template.jinja").write_text(file.read_text("utf-8"), "utf-8")
            (Path(scratch) / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
            try:
                template = ChatTemplate(Path(scratch))
            except ModelError as error:
                print(f"{file.name}: not read: {error}")
                continue
        read += 1
        for name, (messages, functions) in CONVERSATIONS.items():
            one, two = ours(template, messages, functions), theirs(template, messages, functions)
            found = outcome(one, two, template, functions)
            counts[name][found] += 1
            if found.isupper():
                print(f"{file.name}, {name}: {found}\n  ours:   {one!r}\n  theirs: {two!r}")
    columns = sorted({column for count in counts.values() for column in count})
    print(f"\n{read} of {len(files)} templates, {len(CONVERSATIONS)} conversations")
    run.head(("conversation", *columns))
    for name, count in [*counts.items(), ("all", sum(counts.values(), Counter[str]()))]:
        print(run.line((name, *(count[column] for column in columns))))


if __name__ == "__main__":
    main()
