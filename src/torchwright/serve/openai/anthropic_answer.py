"""The answer to POST /v1/messages: blocks of thinking, text and calls, whole or as Anthropic's sequence of events."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchwright.serve.formats.reader import CallArguments, CallBegin, Event, Reasoning
from torchwright.serve.openai.answers import Facts, timing, usage
from torchwright.serve.openai.generation import ChoiceUpdate

REASONS = {"stop": "end_turn", "length": "max_tokens"}
"""Why an answer ended → Anthropic's word for it, where it has one."""
GROWN = ("text", "thinking")
"""Types of blocks whose text has the type's name."""
SIGNATURES = {"thinking": {"signature": ""}}
"""Anthropic signs thinking; clients send the signature back."""


@dataclass
class _Block:
    """A block of the answer while it grows: its plain data, and the text or arguments so far."""

    data: dict[str, Any]
    grown: list[str] = field(default_factory=list)

    def whole(self) -> dict[str, Any]:
        text = "".join(self.grown)
        if self.data["type"] in GROWN:
            return {**self.data, self.data["type"]: text}
        return {**self.data, "input": _input(text)}


class MessagesAnswer:
    """Answers POST /v1/messages."""

    def __init__(self, facts: Facts, stops: Collection[str]) -> None:
        self._facts, self._stops = facts, stops
        self._blocks: list[_Block] = []
        self._last: ChoiceUpdate | None = None

    def put(self, step: ChoiceUpdate) -> None:
        self.events(step)

    def whole(self) -> dict[str, Any]:
        message = self._message([block.whole() for block in self._blocks])
        message |= self._end() | {"usage": self._usage()}
        return message | ({"timing": timing(self._facts.generation)} if self._facts.timing else {})

    def begin(self) -> bytes:
        tokens = {"input_tokens": self._facts.generation.totals.prompt_tokens, "output_tokens": 0}
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": tokens}
        return _event("message_start", message=message)

    def events(self, step: ChoiceUpdate) -> bytes:
        self._last = step
        return b"".join([self._grow(item) for item in step.events])

    def end(self) -> bytes:
        more = {"timing": timing(self._facts.generation)} if self._facts.timing else {}
        return (
            self._close()
            + _event("message_delta", delta=self._end(), usage=self._usage(), **more)
            + _event("message_stop")
        )

    def _grow(self, item: Event) -> bytes:
        if isinstance(item, CallBegin):
            return self._open({"type": "tool_use", "id": item.id, "name": item.name, "input": {}})
        opened, last = b"", self._blocks[-1] if self._blocks else None
        if isinstance(item, CallArguments):
            delta = {"type": "input_json_delta", "partial_json": item.text}
        else:
            kind = "thinking" if isinstance(item, Reasoning) else "text"
            if last is None or last.data["type"] != kind:
                opened = self._open({"type": kind, kind: "", **SIGNATURES.get(kind, {})})
            delta = {"type": f"{kind}_delta", kind: item.text}
        self._blocks[-1].grown.append(item.text)
        return opened + _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _open(self, data: dict[str, Any]) -> bytes:
        closed = self._close()
        self._blocks.append(_Block(data))
        return closed + _event("content_block_start", index=len(self._blocks) - 1, content_block=data)

    def _close(self) -> bytes:
        if not self._blocks:
            return b""
        index, signed = len(self._blocks) - 1, b""
        if self._blocks[-1].data["type"] in SIGNATURES:
            delta = {"type": "signature_delta", "signature": ""}
            signed = _event("content_block_delta", index=index, delta=delta)
        return signed + _event("content_block_stop", index=index)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._facts.id,
            "type": "message",
            "role": "assistant",
            "model": self._facts.model,
            "content": content,
        }

    def _end(self) -> dict[str, Any]:
        assert self._last is not None, "the answer has ended"
        finish, stop = self._last.finish or "", self._last.stop_reason
        called = any(block.data["type"] == "tool_use" for block in self._blocks)
        if finish == "stop" and called:  # text may follow a call
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": REASONS.get(finish, finish), "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Return the usage; Anthropic counts cached tokens separately from the others."""
        used = usage(self._facts.generation)
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": used["completion_tokens"],
        }


def _event(kind: str, **facts: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **facts}) + b"\n\n"


def _input(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; other text, such as a truncated one, goes under Anthropic's name for
    it.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}
