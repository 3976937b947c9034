"""A conversation with tools, whichever request brings it: its prompt, and the grammar of its calls."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchwright.hub.chat_template import (
    RESERVED,
    ChatTemplate,
    TemplateRefused,
    call_arguments,
    join_parts,
)
from torchwright.serve.api_error import invalid
from torchwright.serve.formats.base import Callable, ToolFormat, structural_tag
from torchwright.serve.grammar.compile import GrammarJob
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import Function, ImagePart, Message, VideoPart

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off: Qwen's, and Granite's and DeepSeek's."""

THOUGHTS = ("reasoning_content", "thinking")
"""The names that chat templates have for an assistant's thoughts; the latter is gpt-oss's."""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The functions that an answer may call."""

    functions: Sequence[Function]
    choice: str
    """none, auto, required, or the name of the one that is to be called."""
    named: bool = False
    """Check whether `choice` is a function's name."""
    parallel: bool = True

    def grammar(self, form: ToolFormat) -> GrammarJob | None:
        """Return the grammar of the calls; None where nothing is enforced."""
        functions = self.callable
        if not functions:
            return None
        if self.required:
            allowed = [function for function in functions if not self.named or function.name == self.choice]
            required = form.required(allowed, parallel=self.parallel and not self.named)
            return GrammarJob(kind="tools", text=structural_tag(required))
        strict = form.strict(functions)
        return None if strict is None else GrammarJob(kind="tools", text=structural_tag(strict))

    @property
    def required(self) -> bool:
        """Check whether the answer must be a call."""
        return self.named or self.choice == "required"

    @property
    def callable(self) -> Sequence[Callable]:
        """The functions that the answer may call; none where calls are not wanted."""
        if self.choice == "none":
            return ()
        return [
            Callable(name=function.name, schema=schema_of(function), strict=bool(function.strict))
            for function in self.functions
        ]


def schema_of(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object in any case."""
    return {"type": "object", **(function.parameters or {"properties": {}})}


def prompt_text(
    template: ChatTemplate,
    messages: Sequence[Message],
    asked: Tools,
    *,
    add_generation_prompt: bool = True,
    extra: dict[str, Any] | None = None,
    placeholders: Mapping[str, str] | None = None,
    written: Mapping[str, str] | None = None,
) -> str:
    """The prompt by the model's chat template.

    `placeholders` are what the template writes for a picture and a video. `written` has words that are replaced
    wherever the client wrote them, so that those in the prompt are the template's own.

    Raises `ApiError` (400) where the template has no place for tools, refuses the messages, or `extra` has reserved
    names. A template that refuses the messages gets them in another form of the same content, where there is one.
    """
    taken = sorted(RESERVED & (extra or {}).keys())
    if taken:
        raise invalid(f"chat_template_kwargs cannot set {', '.join(taken)}", "chat_template_kwargs")
    functions = asked.functions if asked.choice != "none" else ()
    if functions and not template.takes_tools:
        raise invalid("the model's chat template has no place for tools", "tools", "unsupported_parameter")
    described: list[dict[str, Any]] = [
        {"type": "function", "function": function.model_dump(exclude_none=True, exclude={"strict"})}
        for function in functions
    ]
    plain = [_plain(message, template) for message in messages]
    if written:
        plain, described, extra = (_replaced(value, written) for value in (plain, described, extra))
    render = partial(
        template.render,
        tools=described or None,
        add_generation_prompt=add_generation_prompt,
        extra=extra,
        placeholders=placeholders,
    )
    try:
        return render(plain)
    except TemplateRefused as error:
        for other in _other_forms(plain):
            with contextlib.suppress(TemplateRefused):
                return render(other)
        raise invalid(error.summary, "messages", "chat_template") from error


def _replaced(value: Any, words: Mapping[str, str]) -> Any:
    """Return what a template is given with words replaced in all texts and names."""
    if isinstance(value, str):
        for word, instead in words.items():
            value = value.replace(word, instead)
    elif isinstance(value, list):
        return [_replaced(item, words) for item in value]
    elif isinstance(value, dict):
        return {_replaced(name, words): _replaced(item, words) for name, item in value.items()}
    return value


Messages = list[dict[str, Any]]


def _other_forms(messages: Messages) -> Iterator[Messages]:
    """Yield the messages in each other form that published templates ask for, and in all of these at once."""
    together, changes = messages, 0
    for change in (_with_joined_systems, _with_single_calls, _with_thoughts_as_content):
        if (changed := change(messages)) != messages:
            yield changed
            together, changes = change(together), changes + 1
    if changes > 1:
        yield together


def _with_joined_systems(messages: Messages) -> Messages:
    """Return the messages with all system messages as one at the beginning, as Qwen 3.5 takes them.

    Agents send several (Codex, OpenCode), and later ones (Claude Code).
    """
    systems = [message for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if len(systems) < 2:
        return [*systems, *others]
    return [{"role": "system", "content": "\n\n".join(map(_text, systems))}, *others]


def _with_single_calls(messages: Messages) -> Messages:
    """Return the messages with one call in each, followed by its result, as Llama 3 takes them."""
    found: Messages = []
    remaining = list(messages)
    while remaining:
        message = remaining.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        results = list(itertools.takewhile(lambda each: each["role"] == "tool", remaining))
        del remaining[: len(results)]
        for call in calls:
            found.append({**message, "tool_calls": [call]})
            found += [result for result in results if result.get("tool_call_id") == call["id"]]
            message = {"role": message["role"], "content": None}  # its text and thoughts are said once
        ids = {call["id"] for call in calls}
        found += [result for result in results if result.get("tool_call_id") not in ids]
    return found


def _with_thoughts_as_content(messages: Messages) -> Messages:
    """Return the messages with thoughts and text before a call as one text, as gpt-oss takes them."""
    return [
        {
            **{name: value for name, value in message.items() if name not in THOUGHTS},
            "content": "\n\n".join((message["thinking"], _text(message))),
        }
        if message.get("tool_calls") and message.get("thinking") and message["content"]
        else message
        for message in messages
    ]


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    # A picture is left out here, which `prompt_of` notices: there is then a place too few.
    return content if isinstance(content, str) else join_parts(part.get("text", "") for part in content)


def template_switches(
    body: Body, template: ChatTemplate, field: str, *, effort: str | None = None, thinking: bool | None = None
) -> dict[str, Any]:
    """Return the chat template's variables for an effort of reasoning and a switch for thinking.

    `field` of `body` asks for them; the request notes it where the template has no such variable.
    """
    asked: dict[str, Any] = {}
    if effort is not None:
        asked["reasoning_effort"] = effort
    if thinking is None and effort is not None:
        thinking = effort != "none"
    if thinking is not None:
        asked |= dict.fromkeys(THINKING_SWITCHES, thinking)
    taken = {name: value for name, value in asked.items() if template.mentions(name)}
    if asked and not taken:
        body.noted.append(field)
    return taken


def _plain(message: Message, template: ChatTemplate) -> dict[str, Any]:
    """Return a message as templates know it: arguments of calls are objects, and thoughts have each of their names."""
    content = message.content
    if isinstance(content, list):
        content = [
            {"type": part.kind}
            if isinstance(part, ImagePart | VideoPart)
            else part.model_dump(exclude_none=True)
            for part in content
        ]
    # Templates older than the role know the developer's messages as the system's.
    developer = message.role == "developer" and not template.knows_developers
    plain: dict[str, Any] = {"role": "system" if developer else message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if (thinking := message.reasoning_content or message.reasoning) is not None:
        plain |= dict.fromkeys(THOUGHTS, thinking)
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": call_arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return plain
