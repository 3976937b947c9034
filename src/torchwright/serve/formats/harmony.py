"""Harmony, gpt-oss's format: messages on channels, of which one is reasoning and one calls functions.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchwright.serve.formats.base import Callable, CallReader, Tag, ToolFormat, tag
from torchwright.serve.formats.json_calls import arguments_of
from torchwright.serve.formats.reader import Reading, Reasoning, Text

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
HEADER_CHARACTERS = 512
"""A message's header is shorter."""
ANALYSIS, NEXT = f"{CHANNEL}analysis{MESSAGE}", f"<|end|>{START}assistant"
FINAL = f"{CHANNEL}final{MESSAGE}"


class HarmonyReader(CallReader):
    """Reads messages: analysis is reasoning, what is for a function is a call, all else is text."""

    def __init__(self, form: HarmonyFormat, functions: Sequence[Callable], *, parallel: bool = True) -> None:
        super().__init__(form, functions, parallel=parallel)
        self._written = set[type[Text] | type[Reasoning]]()

    def _read(self) -> Reading[None]:
        while not self.done:
            self._forget()
            yield from self._space()
            if not self._buffer:
                return
            begins = yield from self._is_header()
            header = (yield from self._until(MESSAGE, limit=HEADER_CHARACTERS)) if begins else None
            if header is None:  # no header, or one that was cut off
                self._buffer, self._taken = self._taken + self._buffer, ""
                if (yield from self._literal(CHANNEL, START)) and self._ended:
                    return
                yield from self._body(Text)
                continue
            recipient = RECIPIENT.search(header[0])
            if recipient and recipient[1] in self._functions:
                yield from self._call(recipient[1])
            else:
                analysis = f"{CHANNEL}analysis" in header[0]
                yield from self._body(Reasoning if analysis else Text)

    def _is_header(self) -> Reading[bool]:
        begins = (CHANNEL, START, "to=")
        while any(begin.startswith(self._buffer) for begin in begins):
            if self._buffer in begins or not (yield from self._more()):
                break
        return self._buffer.startswith(begins)

    def _body(self, kind: type[Text] | type[Reasoning]) -> Reading[None]:
        """Emit a message's text; a line break stands between two of a kind."""
        self.reasoning = kind is Reasoning
        if kind in self._written:
            self._emit(kind, "\n")
        self._written.add(kind)
        mark = yield from self._pass(kind, *ENDS, START, CHANNEL)
        self.reasoning = False
        if mark is None:
            self._emit(kind, self._buffer)
            self._buffer = ""
        elif mark in (START, CHANNEL):  # the end was left out
            self._buffer = mark + self._buffer
        self._forget()

    def _call(self, name: str) -> Reading[None]:
        yield from self._space()
        if not self._buffer.startswith("{"):
            yield from self._body(Text)
            return
        if (yield from self._stream_object(self._begin(name))):
            self._end()
            yield from self._space()
            yield from self._literal(*ENDS)


@dataclass(frozen=True, kw_only=True)
class HarmonyFormat(ToolFormat):
    """Reasoning and calls in one format."""

    name: str = "harmony"
    models: str = "gpt-oss"
    hints: tuple[str, ...] = (CHANNEL,)
    separator: str = NEXT
    reader = HarmonyReader

    @property
    def marks(self) -> tuple[str, ...]:
        return START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS

    @property
    def trigger(self) -> str:
        return f"{CHANNEL}commentary to="

    def tags(self, functions: Sequence[Callable], *, parallel: bool = True) -> list[Tag]:
        return [
            tag(
                f"{CHANNEL}commentary to=functions.{function.name} {CONSTRAIN}json{MESSAGE}",
                arguments_of(function),
                "",
            )
            for function in functions
        ]


HARMONY = HarmonyFormat()
