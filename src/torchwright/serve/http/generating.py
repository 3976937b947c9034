"""The requests that generate (chat completions, completions, responses, messages), in the order of their journey."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from torchwright.serve.api_error import invalid
from torchwright.serve.http.guard import BATCHED, IGNORED, held_body, record_of, while_there
from torchwright.serve.http.service import Service
from torchwright.serve.http.stream import respond
from torchwright.serve.ids import new_id
from torchwright.serve.log import one_line
from torchwright.serve.openai.answers import Facts, ResponseWriter
from torchwright.serve.openai.anthropic_answer import MessagesAnswer
from torchwright.serve.openai.anthropic_request import MessagesRequest
from torchwright.serve.openai.chat_answer import ChatAnswer
from torchwright.serve.openai.completion_answer import CompletionAnswer
from torchwright.serve.openai.generate_request import GenerateRequest
from torchwright.serve.openai.generation import Generation, Unmeasured
from torchwright.serve.openai.language import Prompts
from torchwright.serve.openai.prepare import PreparedRequest, ServedModel, prepare
from torchwright.serve.openai.protocol import ChatRequest, CompletionRequest, Shared, StreamOptions
from torchwright.serve.openai.reading import Generating
from torchwright.serve.openai.request_limits import request_limits_of
from torchwright.serve.openai.response_answer import ResponseAnswer
from torchwright.serve.openai.responses import ResponsesRequest
from torchwright.serve.openai.wanted import of_chat, of_completion, of_messages, of_response
from torchwright.serve.wire.messages import EngineReady

log = logging.getLogger("torchwright.serve")
NAME_CHARACTERS = 64
"""The most characters of a field's name, in a header and in the log."""
TIMING_HEADER = "x-torchwright-timing"
BATCH_PRIORITY = 50
"""The priority of a row of a batch at least: whoever comes within the next 500 s goes first (a level is worth 10 s,
`engine.request.AGEING_S`), and what has waited for longer has its turn."""
TEXTS = (CompletionRequest, GenerateRequest)
"""Requests whose prompts are texts rather than conversations."""


async def chat_completions(service: Service, request: Request) -> Response:
    body, prompts = await read_request(service, request, ChatRequest)
    model, ready = service.decoder(body.model)
    wanted = of_chat(body, model)
    id = new_id("chatcmpl-")
    prepared = await prepare(id, body, prompts, wanted, model, ready, begun=record_of(request).begun)
    facts = _facts(service, request, id, body, prepared, model, ready, stream=body.stream_options)
    answer = ChatAnswer(facts, logprobs=body.logprobs)
    return await _respond(service, request, body.stream, body.user, facts, answer)


async def completions(service: Service, request: Request) -> Response:
    body, prompts = await read_request(service, request, CompletionRequest)
    model, ready = service.decoder(body.model)
    wanted = of_completion(body, ready)
    id = new_id("cmpl-")
    prepared = await prepare(id, body, prompts, wanted, model, ready, begun=record_of(request).begun)
    facts = _facts(service, request, id, body, prepared, model, ready, stream=body.stream_options)
    echo = [submit.ids for submit in prepared.submits] if body.echo else None
    answer = CompletionAnswer(facts, echo=echo, logprobs=body.logprobs is not None)
    return await _respond(service, request, body.stream, body.user, facts, answer)


async def responses(service: Service, request: Request) -> Response:
    body, prompts = await read_request(service, request, ResponsesRequest)
    model, ready = service.decoder(body.model)
    wanted = of_response(body, model)
    id = new_id("resp-")
    prepared = await prepare(id, body, prompts, wanted, model, ready, begun=record_of(request).begun)
    facts = _facts(
        service, request, id, body, prepared, model, ready, stream=StreamOptions(include_usage=True)
    )
    answer = ResponseAnswer(facts, body)
    return await _respond(service, request, body.stream, body.user, facts, answer)


async def messages(service: Service, request: Request) -> Response:
    body, prompts = await read_request(service, request, MessagesRequest)
    model, ready = service.decoder(body.model)
    wanted = of_messages(body, model)
    id = new_id("msg-")
    prepared = await prepare(id, body, prompts, wanted, model, ready, begun=record_of(request).begun)
    facts = _facts(service, request, id, body, prepared, model, ready, stream=None)
    answer = MessagesAnswer(facts, body.stops)
    user = body.metadata.user_id if body.metadata else body.user
    return await _respond(service, request, body.stream, user, facts, answer)


async def read_request(
    service: Service, request: Request, kind: type[Generating]
) -> tuple[Generating, Prompts]:
    """A request and its prompts; the time that this takes counts from its arrival."""
    model, ready = service.decoder(None) if kind in TEXTS else service.chat(None)
    async with held_body(request, service.limits) as body:
        reading = service.reader.generating(kind, body, model, request_limits_of(ready, *service.names))
        here = service.reader.reads_here(kind, body, model)
        found = await (reading if here else while_there(request, reading))
    _note_ignored(request, service, found[0].noted)
    return found


def _note_ignored(request: Request, service: Service, names: Sequence[str]) -> None:
    """Name the fields without effect in the answer's header, and each once in the log."""
    ignored = record_of(request).ignored = tuple(
        dict.fromkeys(one_line(name, NAME_CHARACTERS) for name in names)
    )
    for name in set(ignored) - service.ignored:
        service.ignored.add(name)
        log.info("'%s' is taken without effect; the header %s names such fields", name, IGNORED.decode())


def _facts(
    service: Service,
    request: Request,
    id: str,
    body: Shared,
    prepared: PreparedRequest,
    model: ServedModel,
    ready: EngineReady,
    *,
    stream: StreamOptions | None,
) -> Facts:
    if prepared.unbounded is not None:
        _note_ignored(request, service, [*body.noted, prepared.unbounded])
    metrics = service.metrics
    if BATCHED in request.scope:
        prepared, metrics = _behind(prepared), Unmeasured()
    stream = stream or StreamOptions()
    wanted = request.headers.get(TIMING_HEADER, "0").lower() in ("1", "true")
    return Facts(
        id=id,
        model=body.model if body.model in service.adapters else service.name,
        fingerprint=ready.fingerprint[:16],
        generation=Generation(prepared, service.client, model.tokenizer, metrics, every_token=body.wants_ids),
        tokenizer=model.tokenizer,
        usage=stream.include_usage,
        running_usage=stream.include_usage and stream.continuous_usage_stats,
        timing=body.timing or wanted,
        weights=service.allow_weights is not None,
        token_ids=body.wants_ids,
        id_names=body.names_by_ids,
    )


def _behind(prepared: PreparedRequest) -> PreparedRequest:
    """Return a row of a batch with the priority of one."""
    submits = [
        msgspec.structs.replace(submit, priority=max(BATCH_PRIORITY, submit.priority))
        for submit in prepared.submits
    ]
    return replace(prepared, submits=submits)


async def _respond(
    service: Service, request: Request, stream: bool, user: str | None, facts: Facts, answer: ResponseWriter
) -> Response:
    if stream and BATCHED in request.scope:
        raise invalid("an answer in a file is not streamed", "stream", "unsupported_parameter")
    record = record_of(request)
    record.user = user
    if service.allow_weights is not None:
        record.weight_version = lambda: service.client.weight_version
    return await respond(request, facts.generation, answer, stream=stream, limits=service.limits)
