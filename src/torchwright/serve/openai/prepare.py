"""From a client's request to what the engine is asked: token ids, limits, sampling, grammar."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.formats.answer import TAIL_TOKENS, AnswerForm
from torchwright.serve.formats.base import ToolFormat
from torchwright.serve.formats.reader import Parser, Plain
from torchwright.serve.formats.reasoning import ReasoningFormat
from torchwright.serve.grammar.compile import JSON_OBJECT, GrammarCompiler, GrammarJob
from torchwright.serve.limits import Limits
from torchwright.serve.openai.language import Language, Prompts
from torchwright.serve.openai.parts import JsonSchemaFormat, ResponseFormat
from torchwright.serve.openai.picture_prompt import check_places
from torchwright.serve.openai.protocol import AS_MANY_AS_FIT, Shared
from torchwright.serve.openai.reading import encode
from torchwright.serve.openai.request_limits import RequestLimits, check_ids, check_text, request_limits_of
from torchwright.serve.openai.structured import AskedForm
from torchwright.serve.wire.messages import EngineReady, Grammar, SamplingOptions, Submit, ThinkingBudget

THINKING_SHARE = 0.5
"""Share of an answer's tokens for reasoning before a constrained answer, so that the answer always has room."""
LEAST_TOP_P = 1e-9
"""For a client's 0: the most likely token alone reaches it."""


@dataclass(frozen=True, kw_only=True)
class ServedModel(Language):
    """The HTTP process's view of the served model."""

    name: str
    folder: Path
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    grammars: GrammarCompiler
    limits: Limits
    adapters: dict[str, Path] = field(default_factory=dict)
    """Name → folder of the adapters that requests may choose in place of the model."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of one request, without its prompts and the options that all requests share."""

    n: int = 1
    max_tokens: int | None
    """None or -1: as many as fit."""
    max_tokens_param: str = "max_tokens"
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0
    logprob_ids: tuple[int, ...] = ()
    """Tokens whose log-probabilities are reported as well."""
    form: AskedForm | None = None
    thinking_tokens: tuple[int, str] | None = None
    """The most tokens of reasoning, and the name of the field that bounds them."""
    stops: tuple[str, ...] = ()
    answer: AnswerForm | None = None
    """Format of the answer; None for plain text."""
    specials: bool = False
    """True if special tokens are part of the text of an answer without a format."""
    continues: bool = False
    """True if answers go on from the prompt's own text, rather than being texts of their own."""


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """Rules by which the answers to one prompt become text and end."""

    stops: tuple[str, ...]
    min_tokens: int
    stop_ids: frozenset[int]
    client_stop_ids: frozenset[int]
    """Those that the client named itself."""
    marks: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that are part of an answer's text."""


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """The engine's messages for a request, one `Submit` for each prompt, and the time to prepare them."""

    submits: list[Submit]
    grammars: list[Grammar]
    """Those that the submits name, each once."""
    contexts: list[tuple[list[int], str]]
    """For each prompt the tokens and the text that its answers go on from, as `TextStream` takes them."""
    rules: list[TextRules]
    """One for each prompt."""
    n: int
    prompt_tokens: int
    parser: Callable[[], Parser] = Plain
    """Makes the parser of one answer."""
    unbounded: str | None = None
    """The field that bounds reasoning, where this model's reasoning cannot be bounded."""
    tokenize_s: float
    """From the request's arrival."""
    grammar_s: float


def together(parts: Sequence[PreparedRequest]) -> PreparedRequest:
    """Join requests of the same `n` into one, whose choices are in their order."""
    grammars = {grammar.key: grammar for part in parts for grammar in part.grammars}
    return replace(
        parts[0],
        submits=[submit for part in parts for submit in part.submits],
        grammars=list(grammars.values()),
        contexts=[context for part in parts for context in part.contexts],
        rules=[rule for part in parts for rule in part.rules],
        prompt_tokens=sum(part.prompt_tokens for part in parts),
    )


async def prepare(
    id: str,
    body: Shared,
    prompts: Prompts,
    wanted: Wanted,
    model: ServedModel,
    ready: EngineReady,
    *,
    begun: float,
) -> PreparedRequest:
    """Everything that can be refused without the engine is refused here, as an `ApiError` that names the field.

    `begun` is when the request came, in seconds of `time.perf_counter`; its time-out counts from there.
    """
    limits = request_limits_of(ready, model.name)
    rows = [await _ids(prompt, prompts, model, limits) for prompt in prompts.items]
    rooms = [_answer_tokens(len(ids), wanted, body.min_tokens, limits, prompts.param) for ids in rows]
    if wanted.prompt_logprobs is not None:
        scored = sum(len(ids) - min(wanted.prompt_logprobs_from, len(ids)) for ids in rows)
        check_scored(scored * (1 + wanted.prompt_logprobs + len(wanted.logprob_ids)), model.limits)
    stop_ids = [*([] if body.ignore_eos else ready.stop_ids), *body.stop_token_ids]
    check_ids(body.stop_token_ids, limits, "stop_token_ids")
    check_ids(list(body.logit_bias), limits, "logit_bias")
    tokenized = time.perf_counter()
    parser, marks, thinking = Plain, model.tokenizer.specials if wanted.specials else {}, None
    if form := wanted.answer:
        end = form.prompt_end(model.tokenizer.decode(rows[0][-TAIL_TOKENS:], special=True))
        parser, marks = partial(form.parser, end), model.tokenizer.marks(form.marks)
        if wanted.form is not None:
            wanted = replace(wanted, form=(form.constrained(wanted.form[0], end), wanted.form[1]))
        if form.reasoning and (wanted.form is not None or (wanted.thinking_tokens and ready.stop_ids)):
            thinking = form.reasoning.thinking(end)
    grammar = await _grammar(wanted, model, ready, _left(body.timeout, begun))
    compiled = time.perf_counter()
    submits = [
        Submit(
            id=f"{id}-{place}",
            ids=ids,
            max_tokens=most,
            sampling=_sampling(body),
            n=wanted.n,
            stop_ids=stop_ids,
            min_tokens=body.min_tokens,
            grammar=grammar and grammar.key,
            thinking=_budget(thinking, most, wanted, model),
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
            prompt_logprobs_from=min(wanted.prompt_logprobs_from, len(ids) - 1),
            logprob_ids=list(wanted.logprob_ids),
            priority=body.priority,
            timeout_s=_left(body.timeout, begun),
            pictures=list(prompts.pictures),
            adapter=body.model if body.model in model.adapters else None,
        )
        for place, (ids, most) in enumerate(zip(rows, rooms, strict=True))
    ]
    rules = TextRules(
        stops=(*body.stops, *wanted.stops),
        min_tokens=body.min_tokens,
        stop_ids=frozenset(stop_ids),
        client_stop_ids=frozenset(body.stop_token_ids),
        marks=marks,
    )
    return PreparedRequest(
        submits=submits,
        grammars=[] if grammar is None else [grammar],
        contexts=[model.tokenizer.context(ids) if wanted.continues else ([], "") for ids in rows],
        rules=[rules] * len(rows),
        n=wanted.n,
        prompt_tokens=sum(map(len, rows)),
        parser=parser,
        unbounded=wanted.thinking_tokens[1] if wanted.thinking_tokens and thinking is None else None,
        tokenize_s=tokenized - begun,
        grammar_s=compiled - tokenized,
    )


def _budget(
    thinking: tuple[str, str] | None, most: int, wanted: Wanted, model: ServedModel
) -> ThinkingBudget | None:
    """Return the bound of reasoning in an answer of so many tokens; None where none may come."""
    if thinking is None:
        return None
    begin, end = thinking
    tokens = int(most * THINKING_SHARE) if wanted.form is not None else most
    if wanted.thinking_tokens is not None:
        tokens = min(tokens, wanted.thinking_tokens[0])
    return ThinkingBudget(
        begin=begin, end=end, end_ids=model.tokenizer.encode(end, special=False), tokens=tokens
    )


def form_of(asked: AskedForm | None, response_format: ResponseFormat | None) -> AskedForm | None:
    """Return the grammar of `asked`, or the one that `response_format` asks for, and the field that does."""
    if asked is not None or response_format is None or response_format.type == "text":
        return asked
    if isinstance(response_format, JsonSchemaFormat):
        schema = json.dumps(response_format.json_schema.schema_)
        return GrammarJob(kind="json", text=schema), "response_format.json_schema.schema"
    return JSON_OBJECT, "response_format"


async def _ids(
    prompt: str | list[int], prompts: Prompts, model: ServedModel, limits: RequestLimits
) -> list[int]:
    if isinstance(prompt, str):
        check_text(prompt, model.tokenizer, limits, model.limits.tokenized_bytes, prompts.param)
        prompt = await encode(prompt, model.tokenizer, special=prompts.special)
        if not prompt:
            raise invalid(f"'{prompts.param}' is empty", prompts.param)
    check_ids(prompt, limits, prompts.param)
    if model.pictures is not None:
        check_places(prompt, prompts.pictures, model.pictures.tokens, prompts.param)
    return prompt


def check_scored(values: int, limits: Limits) -> None:
    """Raise `ApiError` (400) for more log-probabilities of prompts than are sent at once."""
    if values > limits.scored_values:
        raise invalid(
            f"the prompts have {values} log-probabilities; at most {limits.scored_values} are sent: send fewer "
            "prompts at once",
            "logprobs",
        )


async def _grammar(
    wanted: Wanted, model: ServedModel, ready: EngineReady, seconds: float | None
) -> Grammar | None:
    """The compiled grammar, if one is asked for and comes within the request's time."""
    if wanted.form is None:
        return None
    job, field = wanted.form
    try:
        async with asyncio.timeout(seconds):
            return await model.grammars.compile(job, ready, field)
    except TimeoutError:
        raise _too_late() from None


def _left(timeout: float | None, begun: float) -> float | None:
    """Seconds that a request still has; raises `ApiError` (408) where it has none."""
    if timeout is None:
        return None
    left = begun + timeout - time.perf_counter()
    if left <= 0:
        raise _too_late()
    return left


def _too_late() -> ApiError:
    """Return a 408 without automatic retry: clients repeat a 408 by default, and this timeout is the client's own."""
    text = "the request's timeout passed before the model could begin with it"
    return ApiError(408, text, param="timeout", code="timeout", headers={"x-should-retry": "false"})


def _answer_tokens(tokens: int, wanted: Wanted, min_tokens: int, limits: RequestLimits, param: str) -> int:
    """Return the limit of new tokens for one prompt."""
    if limits.answer is not None:
        return _separate_answer_tokens(tokens, wanted, min_tokens, limits.context, limits.answer, param)
    context, chunk = limits.context, limits.chunk
    prompt_size = f"the prompt has {tokens}" + (
        f", {-(-tokens // chunk) * chunk} in whole chunks" if chunk > 1 else ""
    )
    tokens = -(-tokens // chunk) * chunk
    asked = None if wanted.max_tokens == AS_MANY_AS_FIT else wanted.max_tokens
    least = 1 if asked is None else asked
    if tokens + least > context:
        raise invalid(
            f"the model's context is {context} tokens here; {prompt_size}"
            + (f" and {wanted.max_tokens_param} is {asked}" if asked is not None else "")
            + f", which is {tokens + least - context} too many",
            param,
            "context_length_exceeded",
        )
    most = context - tokens if asked is None else asked
    if min_tokens > most:
        raise invalid(
            f"min_tokens {min_tokens} is more than the {most} tokens that there may be", "min_tokens"
        )
    return most


def _separate_answer_tokens(
    tokens: int, wanted: Wanted, min_tokens: int, context: int, answer: int, param: str
) -> int:
    """The same where an encoder reads the prompt, so that the answer has room of its own."""
    if tokens > context:
        text = f"the model's encoder reads {context} tokens here; the prompt has {tokens}"
        raise invalid(text, param, "context_length_exceeded")
    most = answer if wanted.max_tokens in (None, AS_MANY_AS_FIT) else wanted.max_tokens
    assert most is not None
    if not most:
        raise invalid(
            f"{wanted.max_tokens_param} 0 is for models without an encoder", wanted.max_tokens_param
        )
    if most > answer:
        text = f"the model's answers have at most {answer} tokens here; {wanted.max_tokens_param} is {most}"
        raise invalid(text, wanted.max_tokens_param, "context_length_exceeded")
    if min_tokens > most:
        raise invalid(
            f"min_tokens {min_tokens} is more than the {most} tokens that there may be", "min_tokens"
        )
    return most


def _sampling(body: Shared) -> SamplingOptions:
    """Every prompt of a request draws with the same seed if one is given, as it would alone."""
    return SamplingOptions(
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        temperature=body.temperature,
        top_k=max(body.top_k, 0),
        top_p=max(body.top_p, LEAST_TOP_P),
        min_p=body.min_p,
        logit_bias=body.logit_bias,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
    )
