"""POST /v1/responses: OpenAI's newer request, without anything stored.

It becomes a conversation like a chat completion's; its answer is a list of items, and its stream names every change.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from torchwright.serve.limits import MESSAGES, PARTS, TOOLS
from torchwright.serve.openai.conversation import Tools, prompt_text
from torchwright.serve.openai.language import Language, Prompts
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import (
    CalledFunction,
    Function,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    Name,
    ResponseFormat,
    TextFormat,
    TextPart,
    ToolCall,
    only_text,
)
from torchwright.serve.openai.protocol import Shared


class InputText(Body):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field([], max_length=0, fail_fast=True)
    logprobs: Annotated[list[Any], Field(max_length=0, fail_fast=True)] | None = None


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(max_length=PARTS, fail_fast=True)]
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
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Item], Field(min_length=1, max_length=MESSAGES, fail_fast=True)]
    )
    """A text, or a list of messages, function calls and their outputs."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = Field(None, ge=1)
    """New tokens at most; as many as fit where it is left out."""
    tools: list[FlatFunction] = Field([], max_length=TOOLS, fail_fast=True)
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    """auto, none, required, or one by name; the last two are enforced by a grammar."""
    parallel_tool_calls: bool = True
    """Whether one answer may hold several calls."""
    text: TextSettings | None = None
    """`format`: text, json_object or json_schema, which is always enforced."""
    store: Literal[False] | None = None
    """Only false: nothing is stored here."""

    EMPTY = {"input": " "}  # noqa: RUF012

    def read(self, language: Language) -> Prompts:
        text = prompt_text(language.template, self.messages(), self.asked_tools)
        return Prompts([text], "input", special=language.template.plain)

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
