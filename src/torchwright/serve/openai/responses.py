"""POST /v1/responses: OpenAI's newer request, without anything stored.

It becomes a conversation like a chat completion's; its answer is a list of items, and its stream names every change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from torchwright.serve.limits import MESSAGES, PARTS, TOOLS
from torchwright.serve.openai.conversation import Tools, template_switches
from torchwright.serve.openai.language import Language, Prompts
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import (
    CalledFunction,
    Detail,
    Function,
    ImagePart,
    ImageUrl,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    Name,
    Part,
    ResponseFormat,
    Text,
    TextFormat,
    TextPart,
    ToolCall,
    VideoPart,
    only,
)
from torchwright.serve.openai.picture_prompt import prompt_of
from torchwright.serve.openai.protocol import HARMLESS, NO_STORE, Shared

BUILT_IN = ("web_search",)
"""Types of tools that OpenAI's server runs; the model answers without them."""
WITHOUT_DATA = (
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "file_search_call.results",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
"""Values of `include` that are accepted: no answer here has any of these."""
LONGEST_NAME = 64
_OF_AN_ANSWER = "part of an answer that is sent back"


class InputText(Body):
    without_effect: ClassVar[dict[str, str]] = dict.fromkeys(("annotations", "logprobs"), _OF_AN_ANSWER)
    type: Literal["input_text", "output_text"]
    text: str


class InputImage(Body):
    refused: ClassVar[dict[str, str]] = {"file_id": "no files are stored here; send image_url"}
    type: Literal["input_image"]
    image_url: Text
    detail: Detail | None = None


class InputVideo(Body):
    """OpenAI's own request has no videos; this part is that of gateways which do."""

    type: Literal["input_video"]
    video_url: Text
    """A URL, with what a `video_url` of a chat completion may have."""


InputPart = Annotated[InputText | InputImage | InputVideo | VideoPart, Field(discriminator="type")]
Content = str | Annotated[list[InputPart], Field(max_length=PARTS, fail_fast=True)]
_only_known = only(
    ("input_text", "output_text", "input_image", "input_video", "video_url"),
    "text, pictures (input_image) and videos (input_video)",
)


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class InputMessage(Body):
    without_effect: ClassVar[dict[str, str]] = {"phase": _OF_AN_ANSWER}
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None

    _kinds = field_validator("content", mode="before")(_only_known)


class InputCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str
    namespace: Name | None = None
    id: str | None = None
    status: str | None = None


class InputCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None

    _kinds = field_validator("output", mode="before")(_only_known)


class InputReasoning(Body):
    """Reasoning of an answer that is sent back; the assistant's message behind it takes its text."""

    without_effect: ClassVar[dict[str, str]] = dict.fromkeys(
        ("summary", "encrypted_content", "id", "status", "internal_chat_message_metadata_passthrough"),
        _OF_AN_ANSWER,
    )
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=PARTS, fail_fast=True)] | None = None


def _kind(item: Any) -> str:
    return str(item.get("type") or "message") if isinstance(item, dict) else str(getattr(item, "type", ""))


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_kind),
]


class FlatFunction(Function):
    """A function as this request writes it: not nested."""

    type: Literal["function"]


class Namespace(Body):
    """Functions under one name, as Codex groups them; the model knows each as `NAMESPACE__NAME`."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[FlatFunction], Field(max_length=TOOLS, fail_fast=True)]


FlatTool = Annotated[FlatFunction | Namespace, Field(discriminator="type")]


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
    without_effect: ClassVar[dict[str, str]] = {"verbosity": "the model has no such switch"}
    defaults: ClassVar[dict[str, Sequence[Any]]] = {"verbosity": ("medium",)}
    format: Annotated[TextFormat | JsonObjectFormat | FlatSchema, Field(discriminator="type")] | None = None


class Reasoning(Body):
    without_effect: ClassVar[dict[str, str]] = dict.fromkeys(
        ("summary", "generate_summary"), "reasoning is not summarized"
    )
    effort: Text | None = None


class ResponsesRequest(Shared):
    """POST /v1/responses"""

    without_effect: ClassVar[dict[str, str]] = HARMLESS | {
        "stream_options": "events are not padded",
        "client_metadata": NO_STORE,
    }
    dropped_tools: ClassVar[tuple[str, ...]] = BUILT_IN

    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Item], Field(min_length=1, max_length=MESSAGES, fail_fast=True)]
    )
    """A text, or a list of messages, function calls and their outputs."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = Field(None, ge=1)
    """New tokens at most; as many as fit where it is left out."""
    tools: list[FlatTool] = Field([], max_length=TOOLS, fail_fast=True)
    """Functions that the model may call, and namespaces of such functions."""
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    """auto, none, required, or one by name; the last two are enforced by a grammar."""
    parallel_tool_calls: bool = True
    """True if one answer may hold several calls."""
    text: TextSettings | None = None
    """`format`: text, json_object or json_schema, which is always enforced."""
    reasoning: Reasoning | None = None
    """`effort` is given to the chat template where the template has such a switch."""
    include: list[Literal[WITHOUT_DATA]] = Field([], max_length=len(WITHOUT_DATA), fail_fast=True)  # type: ignore[valid-type]
    """Further contents of an answer; no answer here has any of them."""

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        names = [function.name for function, _, _ in self._functions]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "two tools have the same name")
        return self

    EMPTY = {"input": " ", "reasoning": None, "include": []}  # noqa: RUF012

    def read(self, language: Language) -> Prompts:
        effort = self.reasoning.effort if self.reasoning else None
        extra = template_switches(self, language.template, "reasoning", effort=effort)
        self.noted.extend(["include"] if self.include else [])
        return prompt_of(language, self.messages(), self.asked_tools, "input", extra=extra)

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
            functions=[function for function, _, _ in self._functions],
            choice=self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else self.tool_choice,
            named=named,
            parallel=self.parallel_tool_calls,
        )

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Return the namespace and the name of each function that has a namespace, by the model's name for it."""
        return {
            function.name: (namespace, name)
            for function, namespace, name in self._functions
            if namespace is not None
        }

    @property
    def _functions(self) -> list[tuple[FlatFunction, str | None, str]]:
        """Every function under the model's name for it, its namespace, and its own name."""
        found: list[tuple[FlatFunction, str | None, str]] = []
        for tool in self.tools:
            if isinstance(tool, FlatFunction):
                found.append((tool, None, tool.name))
                continue
            for inner in tool.tools:
                joined = inner.model_copy(update={"name": _joined(tool.name, inner.name)})
                found.append((joined, tool.name, inner.name))
        return found

    def messages(self) -> list[Message]:
        """The conversation; calls that follow each other are one assistant's message."""
        found = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        calls: list[ToolCall] = []
        thinking: str | None = None
        for item in [self.input] if isinstance(self.input, str) else self.input:
            if isinstance(item, InputReasoning):
                thinking = "\n".join(part.text for part in item.content or ()) or None
                continue
            if isinstance(item, InputCall):
                function = CalledFunction(name=_joined(item.namespace, item.name), arguments=item.arguments)
                calls.append(ToolCall(id=item.call_id, function=function))
                continue
            if calls:
                found.append(Message(role="assistant", tool_calls=calls, reasoning_content=thinking))
                calls, thinking = [], None
            message = _message(item)
            if message.role == "assistant" and thinking is not None:
                message, thinking = message.model_copy(update={"reasoning_content": thinking}), None
            found.append(message)
        if calls:
            found.append(Message(role="assistant", tool_calls=calls, reasoning_content=thinking))
        return found


def _joined(namespace: str | None, name: str) -> str:
    """Return the model's name for a function, which has 64 characters at most."""
    return name if namespace is None else f"{namespace}__{name}"[-LONGEST_NAME:]


def _message(item: str | InputMessage | InputCallOutput) -> Message:
    if isinstance(item, str):
        return Message(role="user", content=item)
    content = item.output if isinstance(item, InputCallOutput) else item.content
    if not isinstance(content, str):
        content = [_part(part) for part in content]
    if isinstance(item, InputCallOutput):
        return Message(role="tool", tool_call_id=item.call_id, content=content)
    return Message(role=item.role, content=content)


def _part(part: InputText | InputImage | InputVideo | VideoPart) -> Part:
    if isinstance(part, InputText):
        return TextPart(type="text", text=part.text)
    if isinstance(part, InputVideo):
        return VideoPart(type="video_url", video_url=part.video_url)
    if isinstance(part, VideoPart):
        return part
    return ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url, detail=part.detail))
