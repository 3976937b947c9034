"""POST /v1/responses: OpenAI's newer request, without anything stored.

It becomes a conversation like a chat completion's; its answer is a list of items, and its stream names every change.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Field, Tag, field_validator

from torchwright.serve.answers import Facts, timing, usage
from torchwright.serve.conversation import Tools
from torchwright.serve.generation import Step
from torchwright.serve.limits import MESSAGES, TOOLS
from torchwright.serve.parse import Body
from torchwright.serve.protocol import (
    CalledFunction,
    Function,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    Name,
    ResponseFormat,
    Shared,
    TextFormat,
    TextPart,
    ToolCall,
    only_text,
)
from torchwright.serve.tools import CallArguments, CallBegin, CallParser, Event, Text


class InputText(Body):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field([], max_length=0)
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: str | None = None
    status: str | None = None

    _text = field_validator("content", mode="before")(only_text)


class InputCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: str | None = None


def _kind(item: Any) -> str:
    return str(item.get("type", "message")) if isinstance(item, dict) else str(getattr(item, "type", ""))


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


class FlatFunction(Function):
    """A function as this request writes it: not nested."""

    type: Literal["function"]


class NamedFunction(Body):
    type: Literal["function"]
    name: Name


class FlatSchema(Body):
    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextSettings(Body):
    format: Annotated[TextFormat | JsonObjectFormat | FlatSchema, Field(discriminator="type")] | None = None


class ResponsesRequest(Shared):
    """POST /v1/responses"""

    input: (
        Annotated[str, Field(min_length=1)] | Annotated[list[Item], Field(min_length=1, max_length=MESSAGES)]
    )
    """A text, or a list of messages, function calls and their outputs."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = Field(None, ge=1)
    """New tokens at most; as many as fit where it is left out."""
    tools: list[FlatFunction] = Field([], max_length=TOOLS)
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    """auto, none, required, or one by name; the last two are enforced by a grammar."""
    parallel_tool_calls: bool = True
    """Whether one answer may hold several calls."""
    text: TextSettings | None = None
    """`format`: text, json_object or json_schema, which is always enforced."""
    store: Literal[False] | None = None
    """Only false: nothing is stored here."""

    @property
    def response_format(self) -> ResponseFormat | None:
        form = self.text.format if self.text else None
        if not isinstance(form, FlatSchema):
            return form
        schema = JsonSchema(name=form.name, schema=form.schema_)
        return JsonSchemaFormat(type="json_schema", json_schema=schema)

    @property
    def asked_tools(self) -> Tools:
        named = isinstance(self.tool_choice, NamedFunction)
        return Tools(
            functions=self.tools,
            choice=self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else self.tool_choice,
            named=named,
            parallel=self.parallel_tool_calls,
        )

    def messages(self) -> list[Message]:
        """The conversation; calls that follow each other are one assistant's message."""
        found = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        calls: list[ToolCall] = []
        for item in [self.input] if isinstance(self.input, str) else self.input:
            if isinstance(item, InputCall):
                function = CalledFunction(name=item.name, arguments=item.arguments)
                calls.append(ToolCall(id=item.call_id, function=function))
                continue
            if calls:
                found.append(Message(role="assistant", tool_calls=calls))
                calls = []
            found.append(_message(item))
        return [*found, Message(role="assistant", tool_calls=calls)] if calls else found


def _message(item: str | InputMessage | InputCallOutput) -> Message:
    if isinstance(item, str):
        return Message(role="user", content=item)
    if isinstance(item, InputCallOutput):
        return Message(role="tool", tool_call_id=item.call_id, content=item.output)
    if isinstance(item.content, str):
        return Message(role=item.role, content=item.content)
    parts = [TextPart(type="text", text=part.text) for part in item.content]
    return Message(role=item.role, content=parts)


@dataclass
class _Open:
    """An item of the answer while it grows: its plain data, and the text or arguments so far."""

    data: dict[str, Any]
    grown: list[str] = field(default_factory=list)


class ResponseAnswer:
    """Answers POST /v1/responses."""

    def __init__(self, facts: Facts, request: ResponsesRequest, parsers: list[CallParser]) -> None:
        self._facts, self._request = facts, request
        self._parser = parsers[0] if parsers else None
        self._items: list[_Open] = []
        self._finish: str | None = None
        self._sequence = 0

    def put(self, step: Step) -> None:
        self.events(step)

    def whole(self) -> dict[str, Any]:
        self._close_last()
        return self._response()

    def begin(self) -> bytes:
        response = self._response()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, step: Step) -> bytes:
        found: list[Event] = [Text(step.text)] if step.text else []
        if self._parser is not None:
            found = [*self._parser.put(step.text), *(self._parser.rest() if step.finish else [])]
            if self._parser.done and not step.finish:
                self._facts.generation.end_choice(step.choice, "one tool call")
        self._finish = step.finish
        return b"".join(self._grow(item) for item in found)

    def end(self) -> bytes:
        closed = self._close_last()
        response = self._response()
        return closed + self._event(f"response.{response['status']}", response=response)

    def _grow(self, item: Event) -> bytes:
        last = self._items[-1] if self._items else None
        if isinstance(item, CallBegin):
            call = {"type": "function_call", "call_id": item.id, "name": item.name, "arguments": ""}
            return self._close_last() + self._open({**call, "id": _new_id("fc")})
        if isinstance(item, CallArguments):
            assert last is not None, "arguments without a call"
            last.grown.append(item.text)
            return self._change("response.function_call_arguments.delta", last, delta=item.text)
        opened = b""
        if last is None or last.data["type"] != "message":
            opened = self._close_last()
            message = {"type": "message", "role": "assistant", "content": [], "id": _new_id("msg")}
            opened += self._open(message)
            last = self._items[-1]
            opened += self._change("response.content_part.added", last, content_index=0, part=_part(""))
        last.grown.append(item.text)
        return opened + self._change(
            "response.output_text.delta", last, content_index=0, delta=item.text, logprobs=[]
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
        if last.data["type"] == "message":
            last.data["content"] = [_part(text)]
            closed = self._change(
                "response.output_text.done", last, content_index=0, text=text, logprobs=[]
            ) + self._change("response.content_part.done", last, content_index=0, part=_part(text))
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


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(facts: Facts) -> dict[str, Any]:
    used = usage(facts.generation)
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": used["prompt_tokens_details"],
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used["total_tokens"],
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
