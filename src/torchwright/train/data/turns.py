"""From a conversation to the texts that inference sees, and the spans of them that are trained on.

A turn is rendered twice: as the prompt that it answers, and as the conversation up to it. What the second adds to the
first is the turn's words. Turns share a text while each text begins with the one before; a template that writes
earlier turns otherwise once others follow (most drop earlier reasoning) gets a text for each such answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchwright.hub.chat_template import ChatTemplate, TemplateRefused
from torchwright.train.data.messages import (
    ASSISTANT,
    RowFault,
    RowPictures,
    plain_messages,
    plain_tools,
    weights,
)

STOP_OUTSIDE = (
    "the end-of-turn token lies outside of the chat template's generation tags; it is trained on all the same"
)
NO_STOP = "the chat template writes no end token behind answers; the model's own follows the last one and is trained on"
APART = (
    "the chat template writes earlier turns otherwise once others follow; such answers are documents of their own, "
    "as inference sees them"
)
UNLIKE_PROMPT = (
    "answers do not begin as the chat template's generation prompt does, so inference sees another beginning"
)

NO_REASONING = "the chat template has no place for an answer's reasoning, which is left out"
NO_TOOLS = "the chat template has no place for tools, which are left out"
TAIL = 20
"""Characters of an answer's end by which it is found in what a template wrote."""

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Marked:
    """A text, and its spans (from, to: characters) that are trained on; None means the whole text."""

    text: str
    spans: tuple[Span, ...] | None = None
    begun: bool = True
    """True if the tokenizer's begin token belongs before it: a chat template writes its own."""
    ended: bool = True
    """True if the end token belongs behind it, trained on."""
    closing: int | None = None
    """The label of a text as a whole, which follows in place of the end token as its only label: its class, or 0."""
    notes: tuple[str, ...] = ()
    """Remarks for the user on how labels were found."""


class Stops:
    """Finds the tokens that end a turn."""

    def __init__(self, special: Iterable[str], ends: Iterable[str]) -> None:
        """`special` are the texts of the tokenizer's special tokens, `ends` of those at which the model stops."""
        ends = [*ends]
        one = _any_of([*special, *ends])
        self._behind = re.compile(rf"\s*{one}")
        self._last = re.compile(rf"{one}\Z")
        self._end = re.compile(_any_of(ends))

    def behind(self, text: str, place: int) -> int | None:
        """Return where a stop ends that follows `place` with nothing but white space between; None without one."""
        found = self._behind.match(text, place)
        return found.end() if found else None

    def end_at(self, text: str, place: int) -> int | None:
        """Return where a token ends that begins at `place` and at which the model stops; None without one."""
        found = self._end.match(text, place)
        return found.end() if found else None

    def ends(self, text: str) -> bool:
        """Check whether a text ends with a stop."""
        return self._last.search(text) is not None

    def last(self, text: str) -> int | None:
        """Return where the stop ends that ends a turn, before white space alone; None without one.

        Some templates write the model's end token once more behind the turn's, on a line of its own.
        """
        end = None
        while found := self._last.search(text := text.rstrip()):
            if end is not None and found.end() == end:
                break
            end, before = found.end(), text[: found.start()]
            if not before or not before[-1].isspace() or not self.ends(before.rstrip()):
                break
            text = before
        return end


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern of any of these texts, the longest first; of none it matches nothing."""
    found = [re.escape(text) for text in sorted({*texts}, key=len, reverse=True) if text]
    return rf"(?:{'|'.join(found)})" if found else r"(?!)"


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """A conversation up to and with one answer."""

    text: str
    begin: int
    """Offset at which the answer begins; everything before it is the prompt."""
    spans: tuple[Span, ...]
    end: int
    """Offset at which the answer and its end token end; text behind them may change when turns follow."""
    stops: bool
    """True if the last label is a token that ends a turn."""
    notes: tuple[str, ...]


@dataclass(kw_only=True)
class _Document:
    """The turns that share a text."""

    turns: list[_Turn] = field(default_factory=list)

    def takes(self, turn: _Turn) -> bool:
        """Check whether the turn continues the text, with nothing before it written otherwise."""
        last = self.turns[-1]
        return turn.text.startswith(last.text[: last.end]) and turn.begin >= last.end

    def marked(self, stops: Stops, *, plain: bool, apart: bool) -> Marked:
        last = self.turns[-1]
        notes = {note: None for turn in self.turns for note in turn.notes}
        if not plain and not last.stops:
            notes[NO_STOP] = None
        if apart:
            notes[APART] = None
        return Marked(
            text=last.text,
            spans=tuple(span for turn in self.turns for span in self._spans(turn, stops)),
            begun=plain,
            ended=not last.stops,
            notes=tuple(notes),
        )

    def _spans(self, turn: _Turn, stops: Stops) -> tuple[Span, ...]:
        """Return a turn's spans, with the next one's beginning where that is what ends it, as in GLM's templates."""
        text = self.turns[-1].text
        if turn.stops or (end := stops.end_at(text, turn.spans[-1][1])) is None:
            return turn.spans
        return *turn.spans, (turn.spans[-1][1], end)


def conversation(
    messages: Any,
    chat: ChatTemplate,
    tools: Any,
    stops: Stops,
    first: int = 0,
    switches: Mapping[str, Any] | None = None,
    pictures: RowPictures | None = None,
    placeholders: Mapping[str, str] | None = None,
) -> list[Marked]:
    """Return a conversation's texts; of its messages from `first` on the assistant's are trained on.

    `switches` are further variables of the template. With `pictures` messages may show some, for which a template that
    takes texts alone writes `placeholders`. Raises `RowFault`.
    """
    plain, functions = plain_messages(messages, pictures), plain_tools(tools)
    wanted = weights(plain)
    turns = [
        place
        for place, said in enumerate(plain)
        if said["role"] == ASSISTANT and place >= first and wanted[place]
    ]
    if not turns:
        raise RowFault("no message is the assistant's: nothing of the row is trained on")
    empty = [place + 1 for place in turns if not _says_something(plain[place])]
    if empty:
        raise RowFault(f"message {empty[0]} is an empty answer, which would teach to stop at once")
    renderer = _Renderer(
        chat, functions, stops, dict(switches or {}), whole_tags=first == 0, placeholders=placeholders or {}
    )
    documents: list[_Document] = []
    for place in turns:
        turn = renderer.turn(plain, place)
        if not documents or not documents[-1].takes(turn):
            documents.append(_Document())
        documents[-1].turns.append(turn)
    found = [document.marked(stops, plain=chat.plain, apart=len(documents) > 1) for document in documents]
    found = [marked for marked in found if any(end > begin for begin, end in marked.spans or ())]
    if not found:
        raise RowFault("the chat template marks nothing as the assistant's: nothing of the row is trained on")
    return found


def _says_something(message: Mapping[str, Any]) -> bool:
    return any(message.get(name) for name in ("tool_calls", "reasoning_content")) or bool(
        message["content"].strip()
    )


def shared_length(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


class _Renderer:
    """Renders the turns of a row by one template."""

    def __init__(
        self,
        chat: ChatTemplate,
        tools: list[dict[str, Any]] | None,
        stops: Stops,
        switches: dict[str, Any],
        *,
        whole_tags: bool,
        placeholders: Mapping[str, str],
    ) -> None:
        """`whole_tags` keeps a generation block that begins within the generation prompt whole."""
        self._placeholders = placeholders
        self._chat, self._tools, self._stops, self._whole_tags = chat, tools, stops, whole_tags
        self._switches = switches

    def turn(self, messages: Sequence[dict[str, Any]], place: int) -> _Turn:
        until = self._render(messages[: place + 1])
        begin, notes = self._begin(messages, place, until)
        notes += self._left_out(messages[place], until[begin:], place)
        if self._chat.tagged:
            return self._by_tags(messages[: place + 1], until, begin, notes)
        # What a template writes behind a turn's end token is not the assistant's.
        last = self._stops.last(until)
        stops = last is not None and last > begin
        end = last if last is not None and stops else len(until)
        return _Turn(text=until, begin=begin, spans=((begin, end),), end=end, stops=stops, notes=notes)

    def _left_out(self, message: dict[str, Any], written: str, place: int) -> tuple[str, ...]:
        """Return notes on what the template leaves out of an answer; raise `RowFault` for the answer itself."""
        names = [call["function"].get("name") for call in message.get("tool_calls", ())]
        if any(str(name) not in written for name in names):
            raise RowFault(f"the chat template leaves out the tool calls of message {place + 1}")
        if message["content"].strip()[-TAIL:] not in written:
            raise RowFault(f"the chat template leaves out the content of message {place + 1}")
        thinking = message.get("reasoning_content")
        reasons = isinstance(thinking, str) and thinking.strip()[-TAIL:] not in written
        return ((NO_REASONING,) if reasons else ()) + (
            (NO_TOOLS,) if self._tools and not self._chat.takes_tools else ()
        )

    def _begin(
        self, messages: Sequence[dict[str, Any]], place: int, until: str
    ) -> tuple[int, tuple[str, ...]]:
        """Return where the answer `place` begins in the text up to it, and a note where its prompt ends otherwise."""
        try:
            prompt = self._render(messages[:place], prompt=True)
        except RowFault:
            if place:
                raise
            prompt = ""  # many templates look at the first message, and the answer is the first here
        if until.startswith(prompt):
            return len(prompt), ()
        shared = shared_length(prompt, until)
        before = self._render(messages[:place]) if place else ""
        if shared < len(before) or not until.startswith(before):
            raise RowFault(
                f"the chat template writes what stands before message {place + 1} otherwise where it is answered: "
                "which words are the assistant's cannot be told"
            )
        return shared, (UNLIKE_PROMPT,)

    def _by_tags(
        self, messages: Sequence[dict[str, Any]], until: str, begin: int, notes: tuple[str, ...]
    ) -> _Turn:
        """Return the turn with the spans that the template tags, and its end token."""
        inside = [span for span in self._tags(messages, until) if span[1] > begin]
        if not self._whole_tags:
            inside = [(max(start, begin), end) for start, end in inside]
        if not inside:
            return _Turn(text=until, begin=begin, spans=(), end=len(until), stops=True, notes=notes)
        end = inside[-1][1]
        stops = self._stops.ends(until[:end].rstrip())
        if not stops and (behind := self._stops.behind(until, end)) is not None:
            inside.append((end, behind))
            end, stops, notes = behind, True, (*notes, STOP_OUTSIDE)
        return _Turn(text=until, begin=begin, spans=tuple(inside), end=end, stops=stops, notes=notes)

    def _tags(self, messages: Sequence[dict[str, Any]], text: str) -> list[Span]:
        """Return the spans inside of the template's generation tags."""
        mark = secrets.token_hex(8)
        begin, end = f"<{mark}", f"{mark}>"  # nobody can have written them into a message
        marked = self._render(messages, marks=(begin, end))
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
        return spans

    def _render(
        self, messages: Sequence[dict[str, Any]], *, prompt: bool = False, marks: tuple[str, str] = ("", "")
    ) -> str:
        try:
            return self._chat.render(
                list(messages),
                tools=self._tools,
                add_generation_prompt=prompt,
                extra=self._switches,
                marks=marks,
                placeholders=self._placeholders,
            )
        except TemplateRefused as error:
            raise RowFault(error.summary) from error
