"""The answer to POST /v1/responses: a list of items, and a stream that names every change of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from torchwright.serve.formats.reader import CallArguments, CallBegin, Event, Reasoning
from torchwright.serve.ids import new_id
from torchwright.serve.openai.answers import Facts, timing, usage
from torchwright.serve.openai.generation import ChoiceUpdate
from torchwright.serve.openai.responses import ResponsesRequest

PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Types of items that grow by text → the type of their part, which names its events."""
LOGPROBS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}, "reasoning": {}}


@dataclass
class _Open:
    """An item of the answer while it grows: its plain data, and the text or arguments so far."""

    data: dict[str, Any]
    grown: list[str] = field(default_factory=list)


class ResponseAnswer:
    """Answers POST /v1/responses."""

    def __init__(self, facts: Facts, request: ResponsesRequest) -> None:
        self._facts, self._request, self._namespaces = facts, request, request.namespaces
        self._items: list[_Open] = []
        self._finish: str | None = None
        self._sequence = 0

    def put(self, step: ChoiceUpdate) -> None:
        self.events(step)

    def whole(self) -> dict[str, Any]:
        self._close_last()
        return self._response()

    def begin(self) -> bytes:
        response = self._response()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, step: ChoiceUpdate) -> bytes:
        self._finish = step.finish
        return b"".join([self._grow(item) for item in step.events])

    def end(self) -> bytes:
        closed = self._close_last()
        response = self._response()
        return closed + self._event(f"response.{response['status']}", response=response)

    def _grow(self, item: Event) -> bytes:
        last = self._items[-1] if self._items else None
        if isinstance(item, CallBegin):
            call: dict[str, Any] = {"type": "function_call", "call_id": item.id, "name": item.name}
            if item.name in self._namespaces:
                call["namespace"], call["name"] = self._namespaces[item.name]
            return self._close_last() + self._open({**call, "arguments": "", "id": new_id("fc_")})
        if isinstance(item, CallArguments):
            assert last is not None, "arguments without a call"
            last.grown.append(item.text)
            return self._change("response.function_call_arguments.delta", last, delta=item.text)
        kind, opened = "reasoning" if isinstance(item, Reasoning) else "message", b""
        if last is None or last.data["type"] != kind:
            opened = self._close_last()
            opened += self._open(_reasoning_item() if kind == "reasoning" else _message_item())
            last = self._items[-1]
            part = _part(kind, "")
            opened += self._change("response.content_part.added", last, content_index=0, part=part)
        last.grown.append(item.text)
        return opened + self._change(
            f"response.{PARTS[kind]}.delta", last, content_index=0, delta=item.text, **LOGPROBS[kind]
        )

    def _open(self, data: dict[str, Any]) -> bytes:
        self._items.append(_Open({**data, "status": "in_progress"}))
        place = len(self._items) - 1
        return self._event("response.output_item.added", output_index=place, item=self._items[-1].data)

    def _close_last(self) -> bytes:
        last = self._items[-1] if self._items else None
        if last is None or last.data["status"] != "in_progress":
            return b""
        text = "".join(last.grown)
        cut = self._finish not in (None, "stop")
        last.data["status"] = "incomplete" if cut else "completed"
        kind = last.data["type"]
        if kind in PARTS:
            part = _part(kind, text)
            last.data["content"] = [part]
            closed = self._change(
                f"response.{PARTS[kind]}.done", last, content_index=0, text=text, **LOGPROBS[kind]
            ) + self._change("response.content_part.done", last, content_index=0, part=part)
        else:
            last.data["arguments"] = text
            closed = self._change("response.function_call_arguments.done", last, arguments=text)
        place = len(self._items) - 1
        return closed + self._event("response.output_item.done", output_index=place, item=last.data)

    def _change(self, kind: str, item: _Open, **facts: Any) -> bytes:
        place = len(self._items) - 1
        return self._event(kind, item_id=item.data["id"], output_index=place, **facts)

    def _event(self, kind: str, **facts: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **facts}
        self._sequence += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"

    def _response(self) -> dict[str, Any]:
        request, finish = self._request, self._finish
        status = {None: "in_progress", "stop": "completed"}.get(finish, "incomplete")
        reason = "max_output_tokens" if finish == "length" else finish
        form = request.text.format if request.text else None
        response: dict[str, Any] = {
            "id": self._facts.id,
            "object": "response",
            "created_at": self._facts.created,
            "completed_at": int(time.time()) if finish else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._facts.model,
            "output": [dict(item.data) for item in self._items],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": form.model_dump(by_alias=True) if form else {"type": "text"}},
            "tool_choice": request.model_dump(include={"tool_choice"})["tool_choice"],
            "tools": [tool.model_dump() for tool in request.tools],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": _usage(self._facts) if finish else None,
            "user": request.user,
            "metadata": {},
        }
        if finish and self._facts.timing:
            response["timing"] = timing(self._facts.generation)
        return response


def _part(kind: str, text: str) -> dict[str, Any]:
    more = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": PARTS[kind], "text": text, **more}


def _message_item() -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [], "id": new_id("msg_")}


def _reasoning_item() -> dict[str, Any]:
    return {
        "type": "reasoning",
        "summary": [],
        "content": [],
        "encrypted_content": None,
        "id": new_id("rs_"),
    }


def _usage(facts: Facts) -> dict[str, Any]:
    used = usage(facts.generation)
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": used["prompt_tokens_details"],
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": facts.generation.totals.reasoning_tokens},
        "total_tokens": used["total_tokens"],
    }
