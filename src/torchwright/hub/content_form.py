"""The forms of messages that a chat template handles, found out by rendering small conversations.

Content is a text, a list of parts, or null, and a call's arguments are an object. A template that knows only texts
fails on the others or writes content as Python does (`[{'type': …}]`, `None`), which no model was trained on; for such
a template they are made texts first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
NEEDLE = "needle"
PARTS = [{"type": "text", "text": NEEDLE}]
USER: Message = {"role": "user", "content": "x"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    ],
}
RESULT: Message = {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "y"}
CONVERSATIONS = {
    "system": lambda content: [{"role": "system", "content": content}, USER],
    "user": lambda content: [{"role": "user", "content": content}],
    "assistant": lambda content: [USER, {"role": "assistant", "content": content}, USER],
    "tool": lambda content: [USER, CALL, RESULT | {"content": content}],
}
"""Role → a conversation in which it has some content."""


@dataclass(frozen=True, kw_only=True)
class ContentForm:
    """Forms of content that one template handles by itself."""

    parts: frozenset[str]
    """Roles whose content may be a list of parts."""
    null: bool
    """True if the content of a message with calls may be null."""
    objects: bool
    """True if a call's arguments may be an object."""


def content_form(render: Callable[[list[Message]], str], refusal: type[Exception]) -> ContentForm:
    """Return the form that a template handles; `render` raises `refusal` for messages that it does not take."""

    def text(messages: list[Message]) -> str | None:
        try:
            return render(messages)
        except refusal:
            return None

    parts = frozenset(role for role, made in CONVERSATIONS.items() if _reads_parts(text(made(PARTS))))
    empty, null = (text([USER, CALL | {"content": content}, RESULT]) for content in ("", None))
    return ContentForm(
        parts=parts,
        null=null is not None and null.count("None") <= (empty or "").count("None"),
        objects=empty is not None or text([USER, _with_text_arguments(CALL), RESULT]) is None,
    )


def fitted_message(message: Message, form: ContentForm, picture: str = "") -> Message:
    """Return a message as a template of this form handles it; `picture` is what stands for one in a text."""
    content = message.get("content")
    if content is None and "content" in message and not form.null:
        message = message | {"content": ""}
    as_text = message.get("role") not in form.parts
    if as_text and isinstance(content, list):
        texts = [picture if _is_picture(part) else part["text"] for part in content if _is_known(part)]
        if len(texts) == len(content):
            message = message | {"content": "\n".join(texts)}
    return message if form.objects or not message.get("tool_calls") else _with_text_arguments(message)


def _with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}


def _reads_parts(text: str | None) -> bool:
    """Check that a part's text is shown, and not the part as Python or JSON writes it."""
    return text is not None and NEEDLE in text and f"'{NEEDLE}'" not in text and f'"{NEEDLE}"' not in text


def _is_known(part: Any) -> bool:
    return _is_picture(part) or (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"
