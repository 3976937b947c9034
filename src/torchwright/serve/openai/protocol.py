"""Request bodies that clients may send: OpenAI's requests, with vLLM's names for fields that OpenAI lacks.

Every field works. A field of OpenAI's that cannot change the answer is accepted without effect and noted. One that
would change the answer is refused by name with the reason (`parse.REFUSED`), and so is any unknown name. The OpenAPI
document and the tables of parameters in the documentation are generated from these classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from torchwright.serve.limits import (
    CHOICES,
    MESSAGES,
    PROMPTS,
    SEQUENCES,
    TOKENS,
    TOOLS,
    TOP_LOGPROBS,
)
from torchwright.serve.openai.conversation import Tools, template_switches
from torchwright.serve.openai.language import Language, Prompts
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.parts import Message, NamedTool, ResponseFormat, Text, Tool
from torchwright.serve.openai.picture_prompt import prompt_of
from torchwright.serve.openai.sampling_fields import Prompted, Sampled, TokenId, TokenIds
from torchwright.serve.openai.structured import Structured

NO_STORE = "nothing is stored here"
_CACHED = "every prompt is looked up in the prefix cache"
HARMLESS = {
    "metadata": NO_STORE,
    "store": NO_STORE,
    "prompt_cache_key": _CACHED,
    "prompt_cache_retention": "the prefix cache keeps what fits",
    "prediction": "speculation is chosen when the server is started",
    "verbosity": "the model has no such switch",
    "service_tier": "there is one tier; use priority",
    "safety_identifier": "user is named in the log",
    "max_tool_calls": "there are no built-in tools",
    "guided_decoding_backend": "there is one",
}
"""Fields of generating requests that cannot change the answer → why."""
SPELLED_OUT: dict[str, Sequence[Any]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "background": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "include": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
"""Defaults that clients spell out: the server does the same without them."""
AS_MANY_AS_FIT = -1
"""Same as max_tokens: llama.cpp's and LM Studio's -1 stands for no limit."""


class StreamOptions(Body):
    without_effect: ClassVar[dict[str, str]] = {"include_obfuscation": "events are not padded"}

    include_usage: bool = False
    """Send one more event with the usage, before the end."""
    continuous_usage_stats: bool = False
    """With include_usage, every event says how many there are so far (vLLM's name)."""


class Shared(Prompted, Sampled, Structured):
    """The fields of all generating requests in the formats of OpenAI and Anthropic."""

    without_effect: ClassVar[dict[str, str]] = HARMLESS
    defaults: ClassVar[dict[str, Sequence[Any]]] = SPELLED_OUT

    stream: bool = False
    """Send the answer as server-sent events while it is made."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    """The same seed gives the same answer to the same request; without one it is drawn."""
    min_tokens: int = Field(0, ge=0)
    """No stop token or stop text before this many tokens."""
    priority: int = Field(0, ge=-100, le=100)
    """Lower is sooner."""
    timeout: float | None = Field(None, gt=0, le=86_400)
    """Seconds from its arrival after which the request ends with what it has, and finish reason `timeout`."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """Named in the request's line of the log."""
    timing: bool = False
    """Say in the answer where its time went; so does the header X-Torchwright-Timing."""

    @property
    def wants_ids(self) -> bool:
        """Check whether the answer has the ids of its tokens."""
        return False

    @property
    def names_by_ids(self) -> bool:
        """Check whether scored tokens are named by their ids."""
        return False


class Choices(Shared):
    """The fields of the two completion requests."""

    n: int = Field(1, ge=1, le=CHOICES)
    """Answers to each prompt."""
    response_format: ResponseFormat | None = None
    """text, json_object, or json_schema with a schema, which is always enforced."""
    stream_options: StreamOptions | None = None
    """With `stream`: include_usage, continuous_usage_stats."""
    return_token_ids: bool = False
    """Give the token ids of the prompt and of each answer, the token that ends it included (vLLM's name)."""
    return_tokens_as_token_ids: bool = False
    """With `logprobs`: name tokens by their ids, such as `token_id:5`, not by their texts (vLLM's name)."""

    @property
    def wants_ids(self) -> bool:
        return self.return_token_ids

    @property
    def names_by_ids(self) -> bool:
        return self.return_tokens_as_token_ids

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is for stream: true")
        if self.form and self.response_format and self.response_format.type != "text":
            raise PydanticCustomError(
                "two_forms", "give response_format or {name}, not both", {"name": self.form[1].split(".")[0]}
            )
        return self


class CompletionRequest(Choices):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]
    )
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    max_tokens: int = Field(16, ge=AS_MANY_AS_FIT)
    """New tokens at most; 0 only reads the prompt (and scores it with `echo`), -1 is as many as fit."""
    echo: bool = False
    """Begin the answer with the prompt; with `logprobs` its tokens are scored too."""
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    """Log-probabilities of the tokens and of this many most likely ones."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        prompts = len(self.prompt) if isinstance(self.prompt, list) and not _is_ids(self.prompt) else 1
        if prompts * self.n > SEQUENCES:
            raise PydanticCustomError(
                "sequences",
                "{prompts} prompts times n={n} are more than {most} answers",
                {"prompts": prompts, "n": self.n, "most": SEQUENCES},
            )
        return self

    EMPTY = {"prompt": ""}  # noqa: RUF012

    def read(self, language: Language) -> Prompts:
        prompt: Any = self.prompt
        single = isinstance(prompt, str) or _is_ids(prompt)
        return Prompts([prompt] if single else prompt, "prompt", special=True)


class ChatRequest(Choices):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES, fail_fast=True)]
    """The conversation: roles system, developer, user, assistant and tool; content is text, and pictures."""
    max_tokens: int | None = Field(None, ge=AS_MANY_AS_FIT)
    """New tokens at most; as many as fit where neither this nor max_completion_tokens is given, or for -1."""
    max_completion_tokens: int | None = Field(None, ge=AS_MANY_AS_FIT)
    """The newer name of max_tokens."""
    logprobs: bool = False
    """Log-probabilities of the answer's tokens."""
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    """With `logprobs`: and of this many most likely ones."""
    tools: Annotated[list[Tool], Field(max_length=TOOLS, fail_fast=True)] | None = None
    """Functions that the model may call, in the model's own format."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """auto (the default with tools), none, required, or one by name; the last two are enforced by a grammar."""
    parallel_tool_calls: bool = True
    """True if one answer may hold several calls."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """More variables for the model's chat template, such as enable_thinking."""
    add_generation_prompt: bool = True
    """True if the prompt ends with the beginning of the assistant's message."""
    reasoning_effort: Text | None = None
    """Given to the chat template where the template has such a switch; "none" turns thinking off where it can."""
    thinking_token_budget: int | None = Field(None, ge=0)
    """After so many tokens the reasoning is ended, where the model reasons by known marks (vLLM's name)."""

    @property
    def thinking_tokens(self) -> tuple[int, str] | None:
        """Return the most tokens of reasoning and the name of the field that bounds them, or None."""
        budget = self.thinking_token_budget
        return None if budget is None else (budget, "thinking_token_budget")

    @model_validator(mode="after")
    def _chat_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is for logprobs: true")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ")
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "two tools have the same name")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise PydanticCustomError("tool_choice", "tool_choice is for requests with tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise PydanticCustomError("tool_choice", "tool_choice names a tool that is not in tools")
        calls = self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
        formed = self.form or (self.response_format and self.response_format.type != "text")
        if calls and formed:
            raise PydanticCustomError(
                "two_forms", "an answer that must be a tool call cannot have another form"
            )
        return self

    EMPTY = {  # noqa: RUF012
        "messages": [{"role": "user", "content": ""}],
        "chat_template_kwargs": {},
        "reasoning_effort": None,
    }

    def read(self, language: Language) -> Prompts:
        template = language.template
        start = self.add_generation_prompt
        switches = template_switches(self, template, "reasoning_effort", effort=self.reasoning_effort)
        extra = switches | self.chat_template_kwargs
        return prompt_of(
            language, self.messages, self.asked_tools, "messages", add_generation_prompt=start, extra=extra
        )

    @property
    def asked_tools(self) -> Tools:
        functions = [tool.function for tool in self.tools or []]
        choice = self.tool_choice or ("auto" if functions else "none")
        named = isinstance(choice, NamedTool)
        return Tools(
            functions=functions,
            choice=choice.function.name if isinstance(choice, NamedTool) else choice,
            named=named,
            parallel=self.parallel_tool_calls,
        )


class EmbeddingRequest(Body):
    """POST /v1/embeddings"""

    input: Text | Annotated[list[Text], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]
    """A text or a list of texts."""
    model: Text | None = None
    """The served model's name."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or little-endian float32 in base64."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """Named in the request's line of the log."""

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        """Clients that count tokens by OpenAI's tokenizers send those ids, which mean nothing to this model."""
        if isinstance(value, list) and any(isinstance(item, int | list) for item in value):
            raise PydanticCustomError("token_ids", "token ids are not embedded: send texts")
        return value


class TokenizeRequest(Body):
    """POST /tokenize"""

    prompt: str | None = None
    """A text, or `messages` instead."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES, fail_fast=True)] | None = None
    """A conversation, through the chat template."""
    model: Text | None = None
    """The served model's name."""
    add_special_tokens: bool = True
    """With `prompt`: the tokens that the model expects around a text."""
    add_generation_prompt: bool = True
    """With `messages`: end with the beginning of the assistant's message."""
    tools: Annotated[list[Tool], Field(max_length=TOOLS, fail_fast=True)] | None = None
    """With `messages`: functions, as the chat template describes them."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """With `messages`: more variables for the chat template."""
    return_token_strs: bool = False
    """Give each token's text too."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_of", "give prompt or messages")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise PydanticCustomError("messages", "tools and chat_template_kwargs are for messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize"""

    tokens: Annotated[list[TokenId], Field(max_length=TOKENS, fail_fast=True)]
    """Token ids."""
    model: Text | None = None
    """The served model's name."""


def _is_ids(prompt: list[Any]) -> bool:
    return isinstance(prompt[0], int)
