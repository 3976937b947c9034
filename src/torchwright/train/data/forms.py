"""What a row says: text, a conversation, a prompt with its completion, a preference, a text of a class, or two that are
alike; and the texts it stands for.

Of conversations and completions a part is trained on: the assistant's words. It is marked in the rendered text, by
places between characters, so that tokens find it by the places they come from.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from torchwright.hub.chat_template import ChatTemplate, TemplateRefused
from torchwright.train.data.shards import DataError

Form = Literal["text", "chat", "completion", "preference", "classification", "embedding"]
NEEDS: dict[Form, tuple[str, ...]] = {
    "text": ("text",),
    "chat": ("messages",),
    "completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
    "classification": ("text", "label"),
    "embedding": ("anchor", "positive"),
}
SAID = ("classification", "embedding")
"""Forms that no columns say: rows with a text and a label may be wanted for their text."""
ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"


class RowFault(Exception):
    """A row that cannot be trained on; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Marked:
    """A text, and the spans of it (from, to: characters) that are trained on; None is all of it."""

    text: str
    spans: tuple[tuple[int, int], ...] | None = None
    ended: bool = True
    """Whether the end token belongs behind it, trained on: a chat template writes its own."""
    closing: int | None = None
    """What stands behind it in place of the end token and is its only label, for what is told of a text as a whole:
    its class, or 0."""


def find_form(present: Mapping[str, Any], columns: Mapping[str, str], form: Form | None, where: str) -> Form:
    """The form whose columns a row has, or `form` if it has those. Raises `DataError`, which names what is there."""
    forms: list[Form] = [form] if form else [kind for kind in NEEDS if kind not in SAID]
    found: list[Form] = [kind for kind in forms if all(columns[need] in present for need in NEEDS[kind])]
    if len(found) == 1:
        return found[0]
    named = ", ".join(sorted(map(str, present))) or "none"
    wanted = [" and ".join(f"'{columns[need]}'" for need in NEEDS[kind]) + f" ({kind})" for kind in forms]
    if found:
        raise DataError(
            f"the rows of {where} could be read in several ways: {', '.join(found)}",
            found=f"columns: {named}",
            next="say which with data.form",
        )
    raise DataError(
        f"the rows of {where} have no columns that are known",
        found=f"columns: {named}",
        allowed="; ".join(wanted),
        next="name yours: data.text_column, messages_column, prompt_column, completion_column, …",
    )


def render(
    form: Form,
    values: Mapping[str, Any],
    columns: Mapping[str, str],
    chat: ChatTemplate,
    labels: Sequence[str] = (),
) -> list[Marked]:
    """The texts of a row: one, of a preference the chosen and the rejected one; none where its text is empty.

    `labels` are the names of classes. Raises `RowFault`.
    """
    missing = [columns[need] for need in NEEDS[form] if values.get(columns[need]) is None]
    if missing:
        raise RowFault(f"no '{missing[0]}' (columns: {', '.join(sorted(map(str, values)))})")
    parts = [values[columns[need]] for need in NEEDS[form]]
    if form == "text":
        text = _text(parts[0], columns["text"])
        return [Marked(text=text)] if text.strip() else []
    if form == "classification":
        return [Marked(text=_filled(parts[0], columns["text"]), closing=_class(parts[1], labels))]
    if form == "embedding":
        return [
            Marked(text=_filled(part, columns[name]), closing=0)
            for part, name in zip(parts, NEEDS[form], strict=True)
        ]
    tools = values.get("tools") or None
    if form == "chat":
        return [_conversation(parts[0], chat, tools)]
    if form == "completion":
        return [_answered(*parts, chat=chat, tools=tools)]
    return _pair(values.get(columns["prompt"]), *parts, chat=chat, tools=tools)


def _pair(prompt: Any, chosen: Any, rejected: Any, *, chat: ChatTemplate, tools: Any) -> list[Marked]:
    """The chosen and the rejected answer, each behind the prompt; without one, behind the messages that both share."""
    if chosen == rejected:
        raise RowFault("the chosen and the rejected answer are the same: nothing is preferred")
    if prompt is not None:
        return [_answered(prompt, answer, chat=chat, tools=tools) for answer in (chosen, rejected)]
    shared = 0
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = sum(
            1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
        )
    return [_conversation(answer, chat, tools, first=shared) for answer in (chosen, rejected)]


def _answered(prompt: Any, answer: Any, *, chat: ChatTemplate, tools: Any) -> Marked:
    """A prompt, as text or as messages, with what follows it; that alone is trained on."""
    if isinstance(prompt, list) and isinstance(answer, list):
        return _conversation([*prompt, *answer], chat, tools, first=len(prompt))
    prompt, answer = _text(prompt, "prompt"), _text(answer, "completion")
    if not answer:
        raise RowFault("the completion is empty: nothing of the row is trained on")
    return Marked(text=prompt + answer, spans=((len(prompt), len(prompt) + len(answer)),))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowFault(f"'{name}' is no text, but {type(value).__name__}")
    return value


def _filled(value: Any, name: str) -> str:
    text = _text(value, name)
    if not text.strip():
        raise RowFault(f"'{name}' is empty")
    return text


def _class(label: Any, labels: Sequence[str]) -> int:
    """The place of a class that is named, or that is its place already."""
    if isinstance(label, str) and label in labels:
        return labels.index(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(labels):
        return label
    raise RowFault(f"the unknown class {str(label)[:40]!r} (head.labels: {', '.join(labels)[:200]})")


def _conversation(messages: Any, chat: ChatTemplate, tools: Any, first: int = 0) -> Marked:
    """The rendered conversation; of its messages from `first` on the assistant's are trained on."""
    plain = _checked(messages)
    turns = [place for place, said in enumerate(plain) if said["role"] == ASSISTANT and place >= first]
    if not turns:
        raise RowFault("no message is the assistant's: nothing of the row is trained on")
    try:
        text = chat.render(plain, tools=tools, add_generation_prompt=False)
        if chat.tagged:
            skipped = sum(said["role"] == ASSISTANT for said in plain[:first])
            spans = _tagged(plain, text, chat, tools)[skipped:]
        else:
            spans = tuple(_by_prefixes(plain, place, text, chat, tools) for place in turns)
    except TemplateRefused as error:
        raise RowFault(error.summary) from error
    if not any(end > begin for begin, end in spans):
        raise RowFault("the chat template marks nothing as the assistant's: nothing of the row is trained on")
    return Marked(text=text, spans=spans, ended=chat.plain)


def _checked(messages: Any) -> list[dict[str, Any]]:
    """Messages as templates know them."""
    if not isinstance(messages, list) or not messages:
        raise RowFault("the messages are no list of objects with 'role' and 'content'")
    plain = []
    for place, message in enumerate(messages, 1):
        if not isinstance(message, dict) or "role" not in message:
            raise RowFault(f"message {place} is no object with 'role' and 'content'")
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            raise RowFault(
                f"message {place} has the unknown role {str(role)[:40]!r} (known: {', '.join(ROLES)})"
            )
        if not isinstance(content, str) and not message.get("tool_calls"):
            raise RowFault(f"message {place} has no text as 'content', but {type(content).__name__}")
        # Parquet has every key in every row, where nothing was said as null.
        said = {name: value for name, value in message.items() if value is not None}
        role = "system" if role == "developer" else role
        plain.append({**said, "role": role, "content": content or ""})
    return plain


def _tagged(
    messages: list[dict[str, Any]], text: str, chat: ChatTemplate, tools: Any
) -> tuple[tuple[int, int], ...]:
    """The spans that the template's own tags say."""
    mark = secrets.token_hex(8)
    begin, end = f"<{mark}", f"{mark}>"  # nobody can have written them into a message
    marked = chat.render(messages, tools=tools, add_generation_prompt=False, marks=(begin, end))
    head, *rest = marked.split(begin)
    spans, place = [], len(head)
    for part in rest:
        inside, closed, behind = part.partition(end)
        if not closed:
            raise RowFault("the chat template's generation tags lie within each other")
        spans.append((place, place + len(inside)))
        place += len(inside) + len(behind)
    if marked.replace(begin, "").replace(end, "") != text:
        raise RowFault("the chat template writes another text where its generation tags are marked")
    return tuple(spans)


def _by_prefixes(
    messages: list[dict[str, Any]], place: int, text: str, chat: ChatTemplate, tools: Any
) -> tuple[int, int]:
    """The span of one turn: from the prompt that it answers to the conversation with it.

    Both must be how the whole text begins; a template that writes a turn otherwise once others follow tells its
    words by generation tags alone.
    """
    prompt = chat.render(messages[:place], tools=tools, add_generation_prompt=True)
    until = chat.render(messages[: place + 1], tools=tools, add_generation_prompt=False)
    if not (text.startswith(until) and until.startswith(prompt)):
        raise RowFault(
            f"the chat template writes message {place + 1} otherwise where it is answered or others follow, and has no "
            "generation tags: which words are the assistant's cannot be told"
        )
    # What a template writes behind a turn's end token is no word of the assistant's.
    words = until.rstrip()
    return len(prompt), len(words if chat.end and words.endswith(chat.end) else until)


def covered(offsets_N2: np.ndarray, spans: tuple[tuple[int, int], ...]) -> np.ndarray:
    """(N,): whether each token's last character lies in a span; of each token, where its characters begin and end."""
    begins, ends = np.array(spans).T
    first_N, behind_N = offsets_N2.T
    # Spans are in their order: the one that a token can lie in is the first that ends no earlier.
    at_N = np.minimum(np.searchsorted(ends, behind_N), len(ends) - 1)
    return (first_N < behind_N) & (behind_N > begins[at_N]) & (behind_N <= ends[at_N])
