"""The forms of messages that a chat template handles, found out by rendering small conversations.

Content is a text, a list of parts, or null, and a call's arguments are an object. A template that knows only texts
fails on the others or writes content as Python does (`[{'type': …}]`, `None`), which no model was trained on; for such
a template they are made texts first. One that knows only parts writes nothing of a text, which is made a part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
CONVERSATIONS: dict[str, Callable[[Any, Message], list[Message]]] = {
    "user": lambda content, user: [user | {"content": content}],
    "system": lambda content, user: [{"role": "system", "content": content}, user],
    "assistant": lambda content, user: [user, {"role": "assistant", "content": content}, user],
    "tool": lambda content, user: [user, CALL, RESULT | {"content": content}],
}
"""Role → a conversation in which it has some content, and the user says something."""


@dataclass(frozen=True, kw_only=True)
class ContentForm:
    """Forms of content that one template handles by itself."""

    parts: frozenset[str]
    """Roles whose content may be a list of parts."""
    parts_alone: frozenset[str]
    """Those whose content may be nothing else, as in LLaVA's templates."""
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

    def read(content: Any, user: Message) -> frozenset[str]:
        return frozenset(
            role for role, made in CONVERSATIONS.items() if _reads_parts(text(made(content, user)))
        )

    user = USER
    if not _reads_parts(text([USER | {"content": NEEDLE}])) and _reads_parts(
        text([USER | {"content": PARTS}])
    ):
        user = USER | {"content": [{"type": "text", "text": USER["content"]}]}
    parts = read(PARTS, user)
    empty, null = (text([user, CALL | {"content": content}, RESULT]) for content in ("", None))
    return ContentForm(
        parts=parts,
        parts_alone=frozenset() if user is USER else parts - read(NEEDLE, user),
        null=null is not None and null.count("None") <= (empty or "").count("None"),
        objects=empty is not None or text([user, _with_text_arguments(CALL), RESULT]) is None,
    )


def fitted_message(message: Message, form: ContentForm, placeholders: Mapping[str, str]) -> Message:
    """Return a message as a template of this form handles it; `placeholders` stand for other parts in a text."""
    content = message.get("content")
    if content is None and "content" in message and not form.null:
        message = message | {"content": ""}
    if isinstance(content, str) and message.get("role") in form.parts_alone:
        message = message | {"content": [{"type": "text", "text": content}]}
    as_text = message.get("role") not in form.parts
    if as_text and isinstance(content, list):
        texts = [_as_text(part, placeholders) for part in content]
        if None not in texts:
            message = message | {"content": "\n".join(text for text in texts if text is not None)}
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


def _as_text(part: Any, placeholders: Mapping[str, str]) -> str | None:
    """Return a part's text, or what stands for it in a text; None for a part that is neither."""
    if not isinstance(part, dict):
        return None
    kind, text = part.get("type"), part.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    return placeholders.get(kind) if isinstance(kind, str) else None
