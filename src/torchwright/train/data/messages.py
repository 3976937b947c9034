"""Normalize the messages and tools of a row to what the server hands the same chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchwright.hub.chat_template import RESERVED, call_arguments, join_parts

ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"
RENAMED = {
    "developer": "system",
    "function": "tool",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
}
"""Roles that templates know by another name: OpenAI's newer and older ones, ShareGPT's, Gemini's."""
SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""Names in ShareGPT's `from`, in addition to the roles themselves."""
NO_TOOL_LIST = "'tools' is no list of functions, nor JSON text of one"
TEXT_PARTS = ("text", "input_text", "output_text")
PICTURE_PARTS = ("image", "image_url", "input_image")
PLACE = "<image>"
"""A picture's place in a text, as LLaVA's and ShareGPT's rows write it."""
WEIGHTS = ("weight", "loss", "train", "trainable", "loss_mask")
"""Fields of a message that leave an answer out where they are 0 or false.

OpenAI's, AgentInstruct's, axolotl's, and the two of verl.
"""


class RowFault(Exception):
    """A row that cannot be trained on; the text says why."""


@dataclass
class RowPictures:
    """The pictures of a row, in the order of their places in its messages."""

    column: list[Any]
    """Those that a column of the row names, for places that name none themselves."""
    sources: list[Any] = field(default_factory=list)
    """The picture of each place: a file's name, a URL, or an object with bytes."""

    def place(self, number: int, part: Mapping[str, Any]) -> dict[str, Any]:
        """Note the picture of a part of message `number`, and return the part as templates take it."""
        own = next((part[name] for name in ("image", "path", "url", "image_url") if part.get(name)), None)
        own = own.get("url") if isinstance(own, dict) and "url" in own else own
        if own is None and not self.column:
            raise RowFault(f"message {number} has a place for a picture, and the row names none for it")
        self.sources.append(self.column.pop(0) if own is None else own)
        return {"type": "image"}


def plain_messages(messages: Any, pictures: RowPictures | None = None) -> list[dict[str, Any]]:
    """Return messages as templates take them: string contents, tool calls with objects as arguments.

    With `pictures`, messages other than the assistant's may show some: parts of the type image, or `PLACE` in a text.
    Raises `RowFault` for what is not a list of messages, or has other content.
    """
    messages = from_json(messages)
    if not isinstance(messages, list) or not messages:
        raise RowFault("the messages are no list of objects with 'role' and 'content'")
    return [_message(place, message, pictures) for place, message in enumerate(messages, 1)]


def _message(place: int, message: Any, pictures: RowPictures | None) -> dict[str, Any]:
    message = _from_sharegpt(message)
    if not isinstance(message, dict) or "role" not in message:
        raise RowFault(f"message {place} is no object with 'role' and 'content'")
    role = RENAMED.get(message["role"], message["role"]) if isinstance(message["role"], str) else None
    if role not in ROLES:
        raise RowFault(
            f"message {place} has the unknown role {str(message['role'])[:40]!r} (known: {', '.join(ROLES)})"
        )
    calls = _calls(place, message)
    # A null stands for a missing key: columnar files have every key in every row.
    plain = {name: value for name, value in message.items() if value is not None}
    plain.pop("function_call", None)
    content = message.get("content")
    if pictures is not None and role != ASSISTANT and _shows(content):
        plain |= {"role": role, "content": _with_pictures(place, content, pictures)}
    else:
        plain |= {"role": role, "content": _content(place, content, empty=bool(calls))}
    if calls:
        plain["tool_calls"] = calls
    # The names that templates and data know reasoning by; the server fills in both that templates read.
    if thinking := plain.get("reasoning_content") or plain.get("reasoning") or plain.get("thinking"):
        plain |= {"reasoning_content": thinking, "thinking": thinking}
    return plain


def _from_sharegpt(message: Any) -> Any:
    """Return a message of ShareGPT's (`from`, `value`) as one with `role` and `content`; others unchanged."""
    if not isinstance(message, dict) or message.get("role") is not None or "from" not in message:
        return message
    rest = {name: value for name, value in message.items() if name not in ("from", "value", "role")}
    speaker, value = message["from"], message.get("value")
    if speaker == "function_call":  # LLaMA-Factory: the value is JSON text of a call, or of several
        calls = from_json(value)
        return {**rest, "role": ASSISTANT, "tool_calls": calls if isinstance(calls, list) else [calls]}
    role = SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else speaker
    return {**rest, "role": role, "content": value}


def _shows(content: Any) -> bool:
    """Check whether a message's content has places for pictures."""
    if isinstance(content, str):
        return PLACE in content
    return isinstance(content, list) and any(_is_picture(part) for part in content)


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in PICTURE_PARTS


def _with_pictures(place: int, content: Any, pictures: RowPictures) -> list[dict[str, Any]]:
    """Return the parts of a content that shows pictures."""
    if isinstance(content, str):
        pieces = content.split(PLACE)
        content = [pieces[0], *(part for piece in pieces[1:] for part in ({"type": "image"}, piece))]
        content = [part for part in content if part != ""]
    return [
        pictures.place(place, part) if _is_picture(part) else {"type": "text", "text": _part(place, part)}
        for part in content
    ]


def _content(place: int, content: Any, *, empty: bool) -> str:
    if content is None and empty:
        return ""
    if isinstance(content, list) and all(isinstance(part, str | dict) for part in content):
        return join_parts(_part(place, part) for part in content)
    if not isinstance(content, str):
        raise RowFault(f"message {place} has no text as 'content', but {type(content).__name__}")
    return content


def _part(place: int, part: str | dict[str, Any]) -> str:
    """Return the text of one part of a message's content."""
    if isinstance(part, str):
        return part
    kind, text = part.get("type", "text"), part.get("text")
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise RowFault(f"message {place} has a content part that is not text: {str(kind)[:40]!r}")
    return text


def _calls(place: int, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message's tool calls in OpenAI's shape; a single `function_call` is its older form."""
    calls = from_json(message.get("tool_calls"))
    if not calls and isinstance(message.get("function_call"), dict):
        calls = [message["function_call"]]
    if not calls:
        return []
    if isinstance(calls, list):
        calls = [from_json(call) for call in calls]
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowFault(f"message {place} has 'tool_calls' that are no list of objects")
    return [_call(call) for call in calls]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"]) if isinstance(call.get("function"), dict) else dict(call)
    around = {name: value for name, value in call.items() if value is not None} if "function" in call else {}
    arguments = function.get("arguments")
    if arguments in (None, ""):  # tables drop empty objects, and templates cannot write what is missing
        function["arguments"] = {}
    elif isinstance(arguments, str):
        function["arguments"] = call_arguments(arguments)
    return {**around, "type": "function", "function": function}


def plain_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return tools in OpenAI's shape, or None without any. Raises `RowFault`.

    Public data sets keep the list, or each tool, as JSON text, because their tables need one type per column.
    """
    tools = from_json(tools)
    if not tools:
        return None
    if not isinstance(tools, list):
        raise RowFault(NO_TOOL_LIST)
    return [_tool(from_json(tool)) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise RowFault(NO_TOOL_LIST)
    return tool if isinstance(tool.get("function"), dict) else {"type": "function", "function": tool}


def from_json(value: Any) -> Any:
    """Return what JSON text of a list or an object stands for; anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def plain_switches(switches: Any) -> dict[str, Any]:
    """Return a row's `chat_template_kwargs`, by which TRL's rows switch reasoning off. Raises `RowFault`."""
    switches = from_json(switches)
    if not switches:
        return {}
    if not isinstance(switches, dict):
        raise RowFault("'chat_template_kwargs' is no object, nor JSON text of one")
    if taken := sorted(RESERVED & switches.keys()):
        raise RowFault(f"'chat_template_kwargs' cannot set {', '.join(taken)}")
    # A null stands for a missing key, as in messages.
    return {name: value for name, value in switches.items() if value is not None}


def weights(messages: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for each message whether it may be trained on: a field of `WEIGHTS` may leave an answer out."""
    return [all(message.get(name, 1) != 0 for name in WEIGHTS) for message in messages]
