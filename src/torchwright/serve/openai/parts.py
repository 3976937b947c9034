"""Parts of clients' requests that several have in common: the form of an answer, tools and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from torchwright.serve.limits import PARTS, TOOLS
from torchwright.serve.openai.parse import Body

Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Detail = Literal["auto", "low", "high", "original"]


class StructuredOutputs(Body):
    """A form that the answer must have; one of the four."""

    json_schema: dict[str, Any] | bool | None = Field(None, alias="json")
    """A JSON schema."""
    regex: Text | None = None
    """A regular expression that the whole answer matches."""
    choice: Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    """The answer is one of these texts."""
    grammar: Text | None = None
    """A grammar in EBNF with a rule `root`."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in self.model_fields_set if getattr(self, name) is not None]
        if len(given) != 1:
            raise PydanticCustomError("one_of", "give one of json, regex, choice and grammar")
        return self


class JsonSchema(Body):
    """A named schema; it is always enforced, strict or not."""

    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments."""
    strict: bool | None = None
    """True if arguments must match the schema even where the model decides by itself to call (tool_choice auto)."""


_CACHED = {"cache_control": "every prompt is looked up in the prefix cache"}


class Tool(Body):
    without_effect: ClassVar[dict[str, str]] = _CACHED
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


_OF_AN_ANSWER = "part of an answer that is sent back"
SENT_BACK = {"provider_specific_fields": _OF_AN_ANSWER}
"""Fields that client libraries leave in an answer's message and send back with it."""


class CalledFunction(Body):
    without_effect: ClassVar[dict[str, str]] = SENT_BACK | {"parsed_arguments": _OF_AN_ANSWER}
    name: Name
    arguments: str


class ToolCall(Body):
    without_effect: ClassVar[dict[str, str]] = SENT_BACK | {"index": _OF_AN_ANSWER}
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(Body):
    without_effect: ClassVar[dict[str, str]] = _CACHED
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    url: Text
    """A data URL, such as data:image/png;base64,…; or http(s), from a host of --allow-url."""
    detail: Detail | None = None
    """Sides of at most 512 pixels (low), 2048 (auto, high), or as many as the model's processor takes (original)."""


class VideoUrl(Body):
    url: Text
    """A data URL, such as data:video/mp4;base64,…, or data:video/jpeg;base64,…,… of frames; or http(s), as pictures."""


class ImagePart(Body):
    without_effect: ClassVar[dict[str, str]] = _CACHED
    kind: ClassVar[str] = "image"
    type: Literal["image_url"]
    image_url: ImageUrl | Text

    @property
    def image(self) -> ImageUrl:
        return ImageUrl(url=self.image_url) if isinstance(self.image_url, str) else self.image_url


class VideoPart(Body):
    without_effect: ClassVar[dict[str, str]] = _CACHED
    kind: ClassVar[str] = "video"
    type: Literal["video_url"]
    video_url: VideoUrl | Text

    @property
    def video(self) -> VideoUrl:
        return VideoUrl(url=self.video_url) if isinstance(self.video_url, str) else self.video_url


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


def only(kinds: Sequence[str], taken: str) -> Callable[[Any], Any]:
    """Return a check of content, which refuses parts of other types by their name before their fields are looked at."""

    def checked(value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in kinds:
                raise PydanticCustomError(
                    "content_part",
                    "content part '{kind}' is not supported: this server takes {taken}",
                    {"kind": kind, "taken": taken},
                )
        return value

    return checked


class Message(Body):
    """One message of a conversation."""

    without_effect: ClassVar[dict[str, str]] = SENT_BACK | dict.fromkeys(
        ("parsed", "annotations", "thinking_blocks", "reasoning_details"), _OF_AN_ANSWER
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(max_length=PARTS, fail_fast=True)] | None = None
    """Text, or a list of parts: texts, pictures and videos; audio is refused."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """The assistant's thinking, for templates that write it again."""
    reasoning: str | None = None
    """Another name of reasoning_content."""
    refusal: None = None
    """Always null, as in an answer that is sent back."""
    audio: None = None
    function_call: None = None

    @property
    def media(self) -> Sequence[ImageUrl | VideoUrl]:
        """The pictures and videos in the content, in their order."""
        content = self.content if isinstance(self.content, list) else ()
        return [
            part.image if isinstance(part, ImagePart) else part.video
            for part in content
            if not isinstance(part, TextPart)
        ]

    _kinds = field_validator("content", mode="before")(
        only(("text", "image_url", "video_url"), "text, pictures (image_url) and videos (video_url)")
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", "a message needs content, unless it is the assistant's")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "only an assistant's message has tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise PydanticCustomError("tool_call_id", "tool_call_id belongs to messages of the role tool")
        return self
