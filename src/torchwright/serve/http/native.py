"""SGLang's own paths that generate, and that empty the prefix cache."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.http.generating import read_request
from torchwright.serve.http.guard import held_body, record_of
from torchwright.serve.http.service import Service
from torchwright.serve.http.stream import respond
from torchwright.serve.ids import new_id
from torchwright.serve.limits import Limits
from torchwright.serve.openai.generate_answer import GenerateAnswer
from torchwright.serve.openai.generate_request import GenerateRequest, PromptOptions
from torchwright.serve.openai.generation import Generation, expect
from torchwright.serve.openai.language import Prompts
from torchwright.serve.openai.parse import Body, parse
from torchwright.serve.openai.prepare import PreparedRequest, check_scored, prepare, together
from torchwright.serve.openai.request_limits import check_ids, check_model, request_limits_of
from torchwright.serve.openai.weights_request import FlushCacheRequest
from torchwright.serve.wire.messages import Control, Controlled, FlushCache

Answer = TypeVar("Answer")
Asked = TypeVar("Asked", bound=Body)
LONGEST = 16 * 1024
"""Bytes of a request about the engine: names and switches."""


async def generate(service: Service, request: Request) -> Response:
    body, prompts = await read_request(service, request, GenerateRequest)
    begun = record_of(request).begun
    model, ready = service.decoder(None)
    asked = body.prompts(len(prompts.items), new_id("gen-"))
    parts = []
    for item, options in zip(prompts.items, asked, strict=True):
        check_model(options.shared.model, service.names)
        check_ids(options.logprob_ids, request_limits_of(ready), "token_ids_logprob")
        one = Prompts([item], prompts.param, prompts.special)  # pyright: ignore[reportArgumentType]
        wanted = options.wanted(continues=ready.answer is None)
        parts.append(await prepare(options.id, options.shared, one, wanted, model, ready, begun=begun))
    prepared = together(parts)
    _check_scores(prepared, asked, model.limits)
    generation = Generation(prepared, service.client, model.tokenizer, service.metrics, every_token=True)
    answer = GenerateAnswer(
        generation,
        asked,
        model.tokenizer,
        lambda: service.client.weight_version,
        begun=begun,
        many=body.many,
        texts=body.return_text_in_logprobs,
    )
    return await respond(request, generation, answer, stream=body.stream, limits=service.limits)


def _check_scores(prepared: PreparedRequest, asked: list[PromptOptions], limits: Limits) -> None:
    """Raise `ApiError` (400) for more log-probabilities than one answer may have."""
    prompts = answers = 0
    for submit, options in zip(prepared.submits, asked, strict=True):
        if options.return_logprob:
            each = 1 + options.top_logprobs + len(options.logprob_ids)
            answers += submit.max_tokens * submit.n * each
            if submit.prompt_logprobs is not None:
                prompts += (len(submit.ids) - submit.prompt_logprobs_from) * each
    check_scored(prompts, limits)
    if answers > limits.scored_answers:
        raise invalid(
            f"the answers may have {answers} log-probabilities; at most {limits.scored_answers} are sent: ask for "
            "fewer tokens or fewer prompts at once",
            "top_logprobs_num",
        )


async def flush_cache(service: Service, request: Request) -> Response:
    """Answered 400 while requests run, as SGLang does."""
    await read_control(service, request, FlushCacheRequest)
    return await flush_cache_plainly(service, request)


async def flush_cache_plainly(service: Service, request: Request) -> Response:
    service.decoder(None)
    await control(service, FlushCache(id=new_id("flush-")), Controlled)
    return PlainTextResponse("The prefix cache is empty.\n")


async def read_control(service: Service, request: Request, kind: type[Asked]) -> Asked:
    """Return a short request, which may have no body where all its fields are optional."""
    service.decoder(None)
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return parse(kind, b"{}")
    async with held_body(request, service.limits) as raw:
        if len(raw) > LONGEST:
            raise ApiError(413, f"the request has {len(raw)} bytes; at most {LONGEST} are read")
        return parse(kind, raw or b"{}")


async def control(service: Service, message: Control, kind: type[Answer]) -> Answer:
    """Return the engine's answer, waited for even if the client leaves: what was asked is done in any case.

    Raises `ApiError` where the engine refuses it.
    """
    mailbox = service.client.mailbox()
    service.client.submit(message, mailbox)
    try:
        (item, *_) = await mailbox.take()
        return expect(item, kind)
    finally:
        service.client.finish(message.id)
