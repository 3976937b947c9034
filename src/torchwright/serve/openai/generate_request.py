"""POST /generate: SGLang's own request, which its language and the trainers of reinforcement learning send.

A field that takes a list has one entry for each prompt; one value is for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

import msgspec
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from torchwright.serve.api_error import invalid
from torchwright.serve.grammar.compile import JSON_OBJECT, GrammarJob
from torchwright.serve.limits import CHOICES, PROMPTS, SCORED_TOKENS, SEQUENCES
from torchwright.serve.openai.language import Language, Prompts
from torchwright.serve.openai.parts import Text
from torchwright.serve.openai.prepare import Wanted
from torchwright.serve.openai.protocol import AS_MANY_AS_FIT, NO_STORE, Shared
from torchwright.serve.openai.sampling_fields import Prompted, Sampled, TokenId, TokenIds
from torchwright.serve.openai.structured import AskedForm, schema_text

ANY_JSON = "$$ANY$$"
"""SGLang's schema of any JSON object."""
_MEDIA = "send pictures and videos in the messages of /v1/chat/completions"
_ONE_PLACE = "one engine serves all requests"
Value = TypeVar("Value")
Id = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[!-~]+$")]
Few = Annotated[list[TokenId], Field(max_length=SCORED_TOKENS, fail_fast=True)]
Top = Annotated[int, Field(ge=0, le=SCORED_TOKENS)]
Start = Annotated[int, Field(ge=-1)]
Each = Value | Annotated[list[Value], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]
"""One value, or one for each prompt."""


class SamplingParams(Sampled):
    """Sampling options of a prompt, in SGLang's names."""

    refused: ClassVar[dict[str, str]] = {
        "stop_regex": "use stop, or regex for the whole answer",
        "structural_tag": "use the tools of /v1/chat/completions",
        "custom_params": "no code of a request's is run",
    }
    without_effect: ClassVar[dict[str, str]] = {
        "spaces_between_special_tokens": "text is decoded as the tokenizer does",
        "stream_interval": "events come less often as an answer grows",
    }
    defaults: ClassVar[dict[str, Sequence[Any]]] = {
        "stop_regex": ([], ""),
        "custom_params": ({},),
        "spaces_between_special_tokens": (True,),
    }

    max_new_tokens: int = Field(128, ge=AS_MANY_AS_FIT)
    """New tokens at most; 0 only reads the prompt, so that the prefix cache has it, and -1 is as many as fit."""
    min_new_tokens: int = Field(0, ge=0)
    """No stop token or stop text before this many tokens."""
    n: int = Field(1, ge=1, le=CHOICES)
    """Answers to each prompt."""
    sampling_seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    """The same seed gives the same answer to the same request; without one it is drawn."""
    regex: Text | None = None
    """A regular expression that the whole answer matches."""
    json_schema: dict[str, Any] | Text | None = None
    """A JSON schema that the answer has, as a text or an object; "$$ANY$$" is any object."""
    ebnf: Text | None = None
    """A grammar of the answer, in EBNF with a rule `root`."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    no_stop_trim: bool = False
    """Leave the stop text, or the text of the stop token, at the end of the answer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sum(value is not None for value in (self.regex, self.json_schema, self.ebnf)) > 1:
            raise PydanticCustomError("two_forms", "give one of regex, json_schema and ebnf")
        if 0 <= self.max_new_tokens < self.min_new_tokens:
            raise PydanticCustomError("min_new_tokens", "min_new_tokens is more than max_new_tokens")
        if isinstance(self.json_schema, str) and self.json_schema != ANY_JSON:
            schema_text(self.json_schema, "json_schema")
        return self

    @property
    def form(self) -> AskedForm | None:
        """Return the grammar of the answer and the field that asks for it."""
        if self.regex is not None:
            return GrammarJob(kind="regex", text=self.regex), "sampling_params.regex"
        if self.ebnf is not None:
            return GrammarJob(kind="grammar", text=self.ebnf), "sampling_params.ebnf"
        if self.json_schema is None:
            return None
        if self.json_schema == ANY_JSON:
            return JSON_OBJECT, "sampling_params.json_schema"
        text = self.json_schema if isinstance(self.json_schema, str) else json.dumps(self.json_schema)
        return GrammarJob(kind="json", text=text), "sampling_params.json_schema"


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """One prompt's options."""

    id: str
    params: SamplingParams
    shared: Shared
    """The options in the names that all other requests have."""
    return_logprob: bool
    logprob_start: int
    """The first prompt token that is scored; -1: only the answer."""
    top_logprobs: int
    logprob_ids: tuple[int, ...]

    def wanted(self, *, continues: bool) -> Wanted:
        """Return what `prepare` is to make of the prompt."""
        scores = self.return_logprob
        return Wanted(
            n=self.params.n,
            max_tokens=self.params.max_new_tokens,
            max_tokens_param="sampling_params.max_new_tokens",
            logprobs=self.top_logprobs if scores else None,
            prompt_logprobs=self.top_logprobs if scores and self.logprob_start >= 0 else None,
            prompt_logprobs_from=max(0, self.logprob_start - 1),  # the engine leaves its first one out
            logprob_ids=self.logprob_ids if scores else (),
            form=self.params.form,
            specials=not self.params.skip_special_tokens,
            continues=continues,
        )


class GenerateRequest(Prompted):
    """POST /generate"""

    refused: ClassVar[dict[str, str]] = {
        "image_data": _MEDIA,
        "audio_data": "the model reads text",
        "video_data": _MEDIA,
        "input_embeds": "send text or input_ids",
        "return_hidden_states": "answers have tokens and their log-probabilities",
        "return_routed_experts": "answers have tokens and their log-probabilities",
        "return_entropy": "answers have tokens and their log-probabilities",
        "return_bytes": "answers have tokens and their text",
        "custom_logit_processor": "no code of a request's is run",
        "session_params": f"{NO_STORE}; send the whole prompt",
        "background": NO_STORE,
        "priority": "use the priority of /v1/completions, where lower is sooner",
        "bootstrap_host": _ONE_PLACE,
        "bootstrap_port": _ONE_PLACE,
        "bootstrap_room": _ONE_PLACE,
        "max_thinking_tokens": "use thinking_token_budget of /v1/chat/completions",
    }
    without_effect: ClassVar[dict[str, str]] = {
        "log_metrics": "all requests are counted",
        "no_logs": "prompts and answers are never logged",
        "custom_labels": "metrics have no labels of requests",
        "session_id": NO_STORE,
        "conversation_id": NO_STORE,
        "routing_key": _ONE_PLACE,
        "routed_dp_rank": _ONE_PLACE,
        "data_parallel_rank": _ONE_PLACE,
        "extra_key": "equal prompts of equal weights have equal keys and values",
        "modalities": "the prompt says what it is",
    }
    defaults: ClassVar[dict[str, Sequence[Any]]] = {
        "return_hidden_states": (False,),
        "return_routed_experts": (False,),
        "return_entropy": (False,),
        "return_bytes": (False,),
        "background": (False,),
        "image_data": ([],),
        "log_metrics": (True,),
        "no_logs": (False,),
    }

    text: Each[str] | None = None
    """A text, or a list of texts."""
    input_ids: Each[TokenIds] | None = None
    """Token ids in place of `text`, or a list of lists of them."""
    sampling_params: Each[SamplingParams] | None = None
    """Sampling options."""
    rid: Each[Id] | None = None
    """An id of the request, by which it may be aborted; a list has one for each prompt."""
    return_logprob: Each[bool] = False
    """Log-probabilities of the answer's tokens, under the model as it is: before temperature and penalties."""
    logprob_start_len: Each[Start] | None = None
    """And of the prompt's from this place on; -1: only the answer's. 0 by default where nothing is generated."""
    top_logprobs_num: Each[Top] = 0
    """And of so many most likely tokens at each place."""
    token_ids_logprob: Few | Annotated[list[Few], Field(max_length=PROMPTS, fail_fast=True)] | None = None
    """And of these tokens at each place."""
    return_text_in_logprobs: bool = False
    """Give the text of each scored token."""
    lora_path: Text | Annotated[list[Text | None], Field(max_length=PROMPTS, fail_fast=True)] | None = None
    """The name of a loaded adapter, in place of `model`."""
    stream: bool = False
    """Send the answer as server-sent events while it is made; each has all of the text so far."""

    EMPTY = {"text": "", "input_ids": None}  # noqa: RUF012

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise PydanticCustomError("one_of", "give text or input_ids")
        for params in self.sampling_params if isinstance(self.sampling_params, list) else ():
            self._noted.extend(f"sampling_params.{name}" for name in params.noted)
        return self

    def read(self, language: Language) -> Prompts:
        if self.text is not None:
            return Prompts([self.text] if isinstance(self.text, str) else self.text, "text", special=True)
        ids: Any = self.input_ids
        return Prompts([ids] if isinstance(ids[0], int) else ids, "input_ids", special=False)

    def bare(self) -> bytes:
        plain = self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=set(self.EMPTY))
        return msgspec.json.encode({**plain, "text": [""] if self.many else ""})

    @property
    def many(self) -> bool:
        """True if the prompts came as a list, and so do the answers."""
        if self.text is not None:
            return isinstance(self.text, list)
        ids: Any = self.input_ids
        return not isinstance(ids[0], int)

    def prompts(self, count: int, id: str) -> list[PromptOptions]:
        """Return the options of so many prompts; `id` is that of a request that has none of its own.

        Raises `ApiError` (400) where a list has another length, and for more answers than one request may have.
        """
        params = _spread(self.sampling_params or SamplingParams.model_validate({}), count, "sampling_params")
        if len({one.n for one in params}) > 1:
            raise invalid("all prompts of a request have the same n", "sampling_params.n")
        if count * params[0].n > SEQUENCES:
            raise invalid(
                f"{count} prompts times n={params[0].n} are more than {SEQUENCES} answers",
                "sampling_params.n",
            )
        id = self.rid if isinstance(self.rid, str) else id
        own = [f"{id}_{place}" for place in range(count)] if count > 1 else [id]
        ids = _spread(self.rid if isinstance(self.rid, list) else own, count, "rid")
        asked = self.token_ids_logprob or []
        rows: list[list[int]] = asked if asked and isinstance(asked[0], list) else [asked] * count  # pyright: ignore
        options = zip(
            ids,
            params,
            _spread(self.return_logprob, count, "return_logprob"),
            _spread(self.logprob_start_len, count, "logprob_start_len"),
            _spread(self.top_logprobs_num, count, "top_logprobs_num"),
            _spread(rows, count, "token_ids_logprob"),
            _spread(self.lora_path, count, "lora_path"),
            strict=True,
        )
        return [
            PromptOptions(
                id=id,
                params=one,
                shared=_shared(one, adapter or self.model),
                return_logprob=scores,
                logprob_start=(0 if one.max_new_tokens == 0 else -1) if start is None else start,
                top_logprobs=top,
                logprob_ids=tuple(few),
            )
            for id, one, scores, start, top, few, adapter in options
        ]


def _spread(value: Value | list[Value], count: int, param: str) -> list[Value]:
    """Return one value for each prompt; raise `ApiError` (400) for a list of another length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise invalid(f"'{param}' has {len(value)} entries for {count} prompts", param)
    return value


def _shared(params: SamplingParams, model: str | None) -> Shared:
    """Return checked options under their names in all other requests."""
    same = {name: getattr(params, name) for name in Sampled.model_fields}
    return Shared.model_construct(
        **same, model=model, min_tokens=params.min_new_tokens, seed=params.sampling_seed
    )
