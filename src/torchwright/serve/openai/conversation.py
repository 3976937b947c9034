"""A conversation with tools, whichever request brings it: its prompt, its grammar, and how its calls are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from torchwright.hub.chat_template import RESERVED, ChatTemplate, TemplateRefused
from torchwright.serve.api_error import invalid
from torchwright.serve.grammar.compile import GrammarJob
from torchwright.serve.openai import tools
from torchwright.serve.openai.calls import CallParser
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import Function, Message


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The functions that an answer may call."""

    functions: Sequence[Function]
    choice: str
    """none, auto, required, or the name of the one that is to be called."""
    named: bool = False
    """Whether `choice` is a function's name."""
    parallel: bool = True

    def grammar(self, form: tools.ToolFormat) -> GrammarJob | None:
        """What the calls must match; None where nothing is enforced."""
        if self.choice == "none" or not self.functions:
            return None
        if self.named or self.choice == "required":
            allowed = [
                function for function in self.functions if not self.named or function.name == self.choice
            ]
            text = tools.required_grammar(form, allowed, parallel=self.parallel and not self.named)
            return GrammarJob(kind="tools", text=text)
        strict = tools.strict_grammar(form, self.functions)
        return None if strict is None else GrammarJob(kind="tools", text=strict)

    def parsers(self, form: tools.ToolFormat, n: int) -> list[CallParser]:
        """One for each choice; none where no call is looked for."""
        if self.choice == "none":
            return []
        names = [function.name for function in self.functions]
        return [CallParser(form, names, parallel=self.parallel) for _ in range(n)] if names else []


def prompt_text(
    template: ChatTemplate,
    messages: Sequence[Message],
    asked: Tools,
    *,
    add_generation_prompt: bool = True,
    extra: dict[str, Any] | None = None,
) -> str:
    """The prompt by the model's chat template.

    Raises `ApiError` (400) where it has no place for tools, refuses the messages, or `extra` has reserved names.
    """
    taken = sorted(RESERVED & (extra or {}).keys())
    if taken:
        raise invalid(f"chat_template_kwargs cannot set {', '.join(taken)}", "chat_template_kwargs")
    functions = asked.functions if asked.choice != "none" else ()
    if functions and not template.takes_tools:
        raise invalid("the model's chat template has no place for tools", "tools", "unsupported_parameter")
    described = [
        {"type": "function", "function": function.model_dump(exclude_none=True, exclude={"strict"})}
        for function in functions
    ]
    try:
        return template.render(
            [_plain(message) for message in messages],
            tools=described or None,
            add_generation_prompt=add_generation_prompt,
            extra=extra,
        )
    except TemplateRefused as error:
        raise invalid(error.summary, "messages", "chat_template") from error


def template_switches(
    body: Body, template: ChatTemplate, field: str, *, effort: str | None = None, thinking: bool | None = None
) -> dict[str, Any]:
    """Return the chat template's variables for an effort of reasoning and a switch for thinking.

    `field` of `body` asks for them; the request notes it where the template has no such variable.
    """
    asked: dict[str, Any] = {}
    if effort is not None:
        asked["reasoning_effort"] = effort
    if thinking is not None or effort == "none":
        asked["enable_thinking"] = bool(thinking)
    taken = {name: value for name, value in asked.items() if template.mentions(name)}
    if asked and not taken:
        body.noted.append(field)
    return taken


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it: text, and arguments of calls as objects."""
    parts = message.content
    content = "\n".join(part.text for part in parts) if isinstance(parts, list) else parts
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content if content is not None else "",
    }
    if message.name is not None:
        plain["name"] = message.name
    if (thinking := message.reasoning_content or message.reasoning) is not None:
        plain["reasoning_content"] = thinking
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str) -> Any:
    """The object that a call's arguments are, or the text where the model wrote none that a prompt can hold."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text
