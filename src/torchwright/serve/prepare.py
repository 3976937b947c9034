"""From a client's request to what the engine is asked: token ids, limits, sampling, grammar."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchwright.serve.api_error import invalid
from torchwright.serve.chat import ChatTemplate
from torchwright.serve.compile_grammar import GrammarCompiler, Job
from torchwright.serve.limits import Limits
from torchwright.serve.messages import Ready, SamplingOptions, Submit
from torchwright.serve.parts import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from torchwright.serve.protocol import Shared
from torchwright.serve.text import Tokenizer
from torchwright.serve.tools import ToolFormat

LONG_TEXT = 16_384
"""Characters from which on a text is tokenized in a thread, so that other requests do not wait for it."""
JSON_OBJECT = '{"type": "object", "additionalProperties": true}'


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the HTTP process knows of the served model."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    tool_format: ToolFormat
    grammars: GrammarCompiler
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a request asks for beside its prompts and what all requests have in common."""

    n: int = 1
    max_tokens: int | None
    """None: as many as fit."""
    max_tokens_param: str = "max_tokens"
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    form: tuple[Job, str] | None = None
    """A grammar, and the name of the field that asks for it."""
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the engine is asked, one `Submit` for each prompt, and how long it took to say so."""

    submits: list[Submit]
    n: int
    stops: tuple[str, ...]
    min_tokens: int
    stop_ids: frozenset[int]
    client_stop_ids: frozenset[int]
    """Those that the client named itself."""
    prompt_tokens: int
    tokenize_s: float
    grammar_s: float


async def prepare(
    id: str,
    body: Shared,
    prompts: Sequence[str] | Sequence[list[int]],
    wanted: Wanted,
    model: Model,
    ready: Ready,
    *,
    special: bool,
    param: str,
) -> Prepared:
    """Everything that can be refused without the engine is refused here, as an `ApiError` that names the field.

    `special` says whether texts get the special tokens around them; `param` is the field of the prompts.
    """
    begun = time.perf_counter()
    rows = [await _ids(prompt, model, ready, special=special, param=param) for prompt in prompts]
    tokenized = time.perf_counter()
    grammar = None
    if wanted.form is not None:
        job, field = wanted.form
        grammar = await model.grammars.compile(job, ready, field)
    compiled = time.perf_counter()
    stop_ids = [*([] if body.ignore_eos else ready.stop_ids), *body.stop_token_ids]
    _check_ids(body.stop_token_ids, ready, "stop_token_ids")
    _check_ids(list(body.logit_bias), ready, "logit_bias")
    submits = [
        Submit(
            id=f"{id}-{place}",
            ids=ids,
            max_tokens=_room(len(ids), wanted, body.min_tokens, ready, param),
            sampling=_sampling(body),
            n=wanted.n,
            stop_ids=stop_ids,
            min_tokens=body.min_tokens,
            grammar=grammar,
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
            priority=body.priority,
            timeout_s=body.timeout,
        )
        for place, ids in enumerate(rows)
    ]
    return Prepared(
        submits=submits,
        n=wanted.n,
        stops=(*body.stops, *wanted.stops),
        min_tokens=body.min_tokens,
        stop_ids=frozenset(stop_ids),
        client_stop_ids=frozenset(body.stop_token_ids),
        prompt_tokens=sum(map(len, rows)),
        tokenize_s=tokenized - begun,
        grammar_s=compiled - tokenized,
    )


def form_of(
    structured: StructuredOutputs | None, response_format: ResponseFormat | None
) -> tuple[Job, str] | None:
    """The grammar that a request asks for, and the field that does."""
    if structured is not None:
        if structured.regex is not None:
            return Job(kind="regex", text=structured.regex), "structured_outputs.regex"
        if structured.choice is not None:
            return Job(kind="choice", text=json.dumps(structured.choice)), "structured_outputs.choice"
        if structured.grammar is not None:
            return Job(kind="grammar", text=structured.grammar), "structured_outputs.grammar"
        return Job(kind="json", text=json.dumps(structured.json_schema)), "structured_outputs.json"
    if response_format is None or response_format.type == "text":
        return None
    if isinstance(response_format, JsonSchemaFormat):
        schema = json.dumps(response_format.json_schema.schema_)
        return Job(kind="json", text=schema), "response_format.json_schema.schema"
    return Job(kind="json", text=JSON_OBJECT), "response_format"


async def encode(text: str, model: Model, *, special: bool, param: str) -> list[int]:
    """Token ids of a text; raises `ApiError` (400) for one that is too long to be tokenized."""
    most = model.limits.tokenized_bytes
    if len(text) > most:
        raise invalid(f"'{param}' has {len(text)} characters; at most {most} are tokenized", param)
    if len(text) < LONG_TEXT:
        return model.tokenizer.encode(text, special=special)
    return await asyncio.to_thread(model.tokenizer.encode, text, special=special)


async def _ids(
    prompt: str | list[int], model: Model, ready: Ready, *, special: bool, param: str
) -> list[int]:
    if isinstance(prompt, str):
        ids = await encode(prompt, model, special=special, param=param)
        if not ids:
            raise invalid(f"'{param}' is empty", param)
        return ids
    _check_ids(prompt, ready, param)
    return prompt


def _check_ids(ids: Sequence[int], ready: Ready, param: str) -> None:
    wrong = next((token for token in ids if not 0 <= token < ready.vocabulary), None)
    if wrong is not None:
        raise invalid(
            f"'{param}': token id {wrong} is out of range; the model has 0 to {ready.vocabulary - 1}", param
        )


def _room(tokens: int, wanted: Wanted, min_tokens: int, ready: Ready, param: str) -> int:
    """How many new tokens one prompt may have."""
    context = min(ready.context, ready.pages * ready.page_tokens)
    asked = wanted.max_tokens
    least = 1 if asked is None else asked
    if tokens + least > context:
        raise invalid(
            f"the model's context is {context} tokens here; the prompt has {tokens}"
            + (f" and {wanted.max_tokens_param} is {asked}" if asked is not None else "")
            + f", which is {tokens + least - context} too many",
            param,
            "context_length_exceeded",
        )
    room = context - tokens if asked is None else asked
    if min_tokens > room:
        raise invalid(
            f"min_tokens {min_tokens} is more than the {room} tokens that there may be", "min_tokens"
        )
    return room


def _sampling(body: Shared) -> SamplingOptions:
    """Every prompt of a request draws with the same seed if one is given, as it would alone."""
    return SamplingOptions(
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        temperature=body.temperature,
        top_k=max(body.top_k, 0),
        top_p=body.top_p,
        min_p=body.min_p,
        logit_bias=body.logit_bias,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
    )
