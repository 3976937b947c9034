"""POST /v1/messages: Anthropic's request, without anything stored.

It becomes a conversation like a chat completion's: tool results become messages of the role tool, a system prompt the
first message. `anthropic_answer.py` writes the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from torchwright.serve.limits import MESSAGES, PARTS, STOPS, TOOLS
from torchwright.serve.openai.conversation import Tools, template_switches
from torchwright.serve.openai.language import Language, Prompts
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import (
    CalledFunction,
    Function,
    ImagePart,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    Name,
    Part,
    Text,
    TextPart,
    ToolCall,
)
from torchwright.serve.openai.picture_prompt import prompt_of
from torchwright.serve.openai.protocol import HARMLESS, SPELLED_OUT, Shared
from torchwright.serve.openai.sampling_fields import Stop

TAKEN = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")
VIDEOS = ("video", "video_url", "input_video")
"""Types of blocks by which other APIs bring a video."""
IN_ANOTHER_API = (
    "; Anthropic's API has no block for videos: send them to /v1/chat/completions as video_url, or to /v1/responses as "
    "input_video"
)
RUN_BY_ANTHROPIC = ("web_search", "web_fetch", "code_execution")
"""Prefixes of the tool types that Anthropic's server runs; the model answers without them."""
_OF_AN_ANSWER = "part of an answer that is sent back"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's words for how tools are chosen → OpenAI's."""


class CacheControl(Body):
    """Taken wherever Anthropic has it: every prompt is looked up in the prefix cache as it is."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    without_effect: ClassVar[dict[str, str]] = {"citations": _OF_AN_ANSWER}
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Base64Source(Body):
    type: Literal["base64"]
    kind: Text = Field(alias="media_type")
    """Not relied on: the file's own first bytes say what it is."""
    data: Text


class UrlSource(Body):
    type: Literal["url"]
    url: Text


class ImageBlock(Body):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: CacheControl | None = None

    @property
    def url(self) -> str:
        if isinstance(self.source, UrlSource):
            return self.source.url
        return f"data:;base64,{self.source.data}"


Shown = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ThinkingBlock(Body):
    """The assistant's thinking, for templates that write it again."""

    without_effect: ClassVar[dict[str, str]] = {"signature": _OF_AN_ANSWER}
    type: Literal["thinking"]
    thinking: str
    cache_control: CacheControl | None = None


class RedactedThinkingBlock(Body):
    """Thinking that only Anthropic's server can read: left out."""

    without_effect: ClassVar[dict[str, str]] = {"data": _OF_AN_ANSWER}
    type: Literal["redacted_thinking"]


class ToolUse(Body):
    without_effect: ClassVar[dict[str, str]] = {"caller": _OF_AN_ANSWER}
    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None


def _only_taken(value: Any) -> Any:
    """Other kinds of content are refused by their name, before their fields are looked at."""
    for block in value if isinstance(value, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in TAKEN:
            raise PydanticCustomError(
                "content_block",
                "content block '{kind}' is not supported: this server takes text and pictures{instead}",
                {"kind": kind, "instead": IN_ANOTHER_API if kind in VIDEOS else ""},
            )
    return value


class ToolResult(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[Shown], Field(max_length=PARTS, fail_fast=True)] = ""
    is_error: bool = False
    """True if the tool failed: the model then reads `Error: ` before the content."""
    cache_control: CacheControl | None = None

    _kinds = field_validator("content", mode="before")(_only_taken)


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
    Discriminator("type"),
]


class Turn(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1, max_length=PARTS, fail_fast=True)]

    _kinds = field_validator("content", mode="before")(_only_taken)

    @model_validator(mode="after")
    def _sides(self) -> Self:
        kinds = {block.type for block in self.blocks}
        if self.role != "assistant" and "tool_use" in kinds:
            raise PydanticCustomError("tool_use", "only an assistant's message has tool_use blocks")
        if self.role != "assistant" and kinds & {"thinking", "redacted_thinking"}:
            raise PydanticCustomError("thinking", "only an assistant's message has thinking blocks")
        if self.role != "user" and "tool_result" in kinds:
            raise PydanticCustomError("tool_result", "only a user's message has tool_result blocks")
        return self

    @property
    def blocks(self) -> Sequence[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


class ToolDefinition(Body):
    without_effect: ClassVar[dict[str, str]] = {
        "eager_input_streaming": "arguments are streamed as they are written",
        "defer_loading": "every tool is given to the model",
        "allowed_callers": "the model calls every tool itself",
        "input_examples": "templates have no place for them",
    }
    name: Name
    input_schema: dict[str, Any]
    """A JSON schema of the arguments."""
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    """True if arguments must match the schema even where the model decides by itself to call."""
    cache_control: CacheControl | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "none", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("tool_choice", "a name belongs to the tool_choice of the type tool")
        return self


class Metadata(Body):
    user_id: Annotated[str, Field(max_length=256)] | None = None


class Thinking(Body):
    without_effect: ClassVar[dict[str, str]] = {"display": "thinking is shown as the model writes it"}
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    """Tokens of thinking at most."""


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Text | None = None


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens"""

    without_effect: ClassVar[dict[str, str]] = {
        "context_management": "the conversation is taken as it is sent",
        "service_tier": "there is one tier; use priority",
        "inference_geo": "the model runs where this server runs",
        "speed": "there is one speed",
    }
    defaults: ClassVar[dict[str, Sequence[Any]]] = {
        "service_tier": ("auto", "standard_only"),
        "mcp_servers": ([],),
    }
    dropped_tools: ClassVar[tuple[str, ...]] = RUN_BY_ANTHROPIC

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MESSAGES, fail_fast=True)]
    """The conversation: roles user, assistant and system; blocks of text, image, tool_use and tool_result."""
    model: Text | None = None
    """The served model's name; the served one where it is left out. Another name is a 404."""
    system: str | Annotated[list[TextBlock], Field(max_length=PARTS, fail_fast=True)] | None = None
    """A system message before the conversation."""
    tools: list[ToolDefinition] = Field([], max_length=TOOLS, fail_fast=True)
    """Functions that the model may call, with their `input_schema`; built-in tools are not available."""
    tool_choice: ToolChoice | None = None
    """auto (the default with tools), any, none, or a tool by name; any and a name are enforced by a grammar."""
    thinking: Thinking | None = None
    """enabled, adaptive or disabled: the chat template's own switch, if it has one; `budget_tokens` bounds it."""
    output_config: OutputConfig | None = None
    """`format`: json_schema with a schema, which is always enforced; `effort`, where the chat template has a switch."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """More variables for the model's chat template, such as enable_thinking (vLLM's name)."""
    cache_control: CacheControl | None = None
    """Taken, here and in blocks: every prompt is looked up in the prefix cache."""

    @model_validator(mode="after")
    def _answerable(self) -> Self:
        if self.messages[-1].role == "assistant":
            raise PydanticCustomError(
                "prefill", "the last message is the assistant's; the model begins its answers itself"
            )
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "two tools have the same name")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not names:
            raise PydanticCustomError("tool_choice", "tool_choice is for requests with tools")
        if choice is not None and choice.name is not None and choice.name not in names:
            raise PydanticCustomError("tool_choice", "tool_choice names a tool that is not in tools")
        return self

    @property
    def asked_tools(self) -> Tools:
        functions = [
            Function(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            )
            for tool in self.tools
        ]
        choice = self.tool_choice or ToolChoice(type="auto" if functions else "none")
        return Tools(
            functions=functions,
            choice=choice.name or CHOICES[choice.type],
            named=choice.name is not None,
            parallel=not choice.disable_parallel_tool_use,
        )

    @property
    def response_format(self) -> JsonSchemaFormat | None:
        form = self.output_config.format if self.output_config else None
        if form is None:
            return None
        return JsonSchemaFormat(
            type="json_schema", json_schema=JsonSchema(name="answer", schema=form.schema_)
        )

    def read(self, language: Language) -> Prompts:
        """Return the prompt to continue or count; raises `ApiError` (400) if the chat template refuses it."""
        thinking = self.thinking and self.thinking.type != "disabled"
        effort = self.output_config.effort if self.output_config else None
        switches = template_switches(
            self, language.template, "thinking", thinking=thinking
        ) | template_switches(self, language.template, "output_config.effort", effort=effort)
        extra = switches | self.chat_template_kwargs
        return prompt_of(language, self.conversation(), self.asked_tools, "messages", extra=extra)

    def conversation(self) -> list[Message]:
        """The messages as a chat completion has them."""
        system = [Message(role="system", content=_text(self.system))] if self.system else []
        return [*system, *(message for turn in self.messages for message in _messages(turn))]


class MessagesRequest(CountTokensRequest, Shared):
    """POST /v1/messages"""

    EMPTY = {  # noqa: RUF012
        "messages": [{"role": "user", "content": ""}],
        "system": None,
        "chat_template_kwargs": {},
    }
    without_effect: ClassVar[dict[str, str]] = HARMLESS | CountTokensRequest.without_effect
    defaults: ClassVar[dict[str, Sequence[Any]]] = SPELLED_OUT | CountTokensRequest.defaults

    max_tokens: int = Field(ge=1)
    """New tokens at most."""
    stop_sequences: list[Stop] = Field([], max_length=STOPS, fail_fast=True)
    """Texts that end the answer, not included in it. Same as `stop`."""
    metadata: Metadata | None = None
    """`user_id` is named in the request's line of the log."""

    @property
    def thinking_tokens(self) -> tuple[int, str] | None:
        """Return the most tokens of reasoning and the name of the field that bounds them, or None."""
        budget = self.thinking.budget_tokens if self.thinking else None
        return None if budget is None else (budget, "thinking.budget_tokens")

    @property
    def stops(self) -> list[str]:
        return [*super().stops, *self.stop_sequences]


def _messages(turn: Turn) -> Iterator[Message]:
    """A turn's messages: one for each tool result, and one for all that is said."""
    calls = [
        ToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=json.dumps(block.input)))
        for block in turn.blocks
        if isinstance(block, ToolUse)
    ]
    for block in turn.blocks:
        if isinstance(block, ToolResult):
            content = _content(block.content, "Error: " if block.is_error else "")
            yield Message(role="tool", tool_call_id=block.tool_use_id, content=content)
    said = [block for block in turn.blocks if isinstance(block, TextBlock | ImageBlock)]
    thought = [block.thinking for block in turn.blocks if isinstance(block, ThinkingBlock)]
    if said or calls or thought:
        yield Message(
            role=turn.role,
            content=_content(said) if said else None,
            tool_calls=calls or None,
            reasoning_content="\n".join(thought) or None,
        )


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _content(blocks: str | Sequence[TextBlock | ImageBlock], begin: str = "") -> str | list[Part]:
    """Return a message's content behind a text with which it begins: a text, or parts where there are pictures."""
    if isinstance(blocks, str):
        return begin + blocks
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    if len(texts) == len(blocks):
        return begin + _text(texts)
    parts: list[Part] = [
        TextPart(type="text", text=block.text)
        if isinstance(block, TextBlock)
        else ImagePart(type="image_url", image_url=block.url)
        for block in blocks
    ]
    return [TextPart(type="text", text=begin), *parts] if begin else parts
