"""The application: which path does what. Each handler reads in the order in which a request travels."""

from __future__ import annotations

import base64
import secrets
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Lifespan

from torchwright.serve.answers import Answer, ChatAnswer, CompletionAnswer, Facts
from torchwright.serve.api_error import ApiError, invalid, unavailable
from torchwright.serve.client import EngineClient, Lost
from torchwright.serve.conversation import Tools, prompt_text
from torchwright.serve.generation import Generation, refusal
from torchwright.serve.guard import Guard, Record, read_body
from torchwright.serve.limits import Limits
from torchwright.serve.messages import Embed, Embedded, Ready, Refused
from torchwright.serve.metrics import CONTENT_TYPE, Metrics
from torchwright.serve.openapi import Operation, document
from torchwright.serve.parse import parse
from torchwright.serve.prepare import Model, Prepared, Wanted, encode, form_of, prepare
from torchwright.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    NamedTool,
    Shared,
    TokenizeRequest,
)
from torchwright.serve.responses import ResponseAnswer, ResponsesRequest
from torchwright.serve.stream import Json, respond

PAGE = Path(__file__).parent / "page" / "index.htm"
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TIMING_HEADER = "x-torchwright-timing"
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(kw_only=True)
class Service:
    """One served model, and everything that answers for it."""

    name: str
    client: EngineClient
    model: Model | None
    """The tokenizer and its companions; None for a sentence encoder, whose engine tokenizes."""
    limits: Limits = field(default_factory=Limits)
    keys: Sequence[str] = ()
    log_requests: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def metrics(self) -> Metrics:
        return Metrics(self.client, self.name)

    def app(self, lifespan: Lifespan[Guard] | None = None) -> ASGIApp:
        """The ASGI application; `lifespan` starts and ends what it needs."""
        routes = [
            Route(op.path, _at(op.path, getattr(self, op.name)), methods=[op.method]) for op in OPERATIONS
        ]
        routes.append(Route("/", _at("/", self.page), methods=["GET"]))
        inner = Router(
            routes, lifespan=lifespan
        )  # without Starlette's own layers: the guard answers for faults
        return Guard(
            inner,
            keys=self.keys,
            log_requests=self.log_requests,
            count=lambda path, status: self.metrics.requests.labels(path, str(status)).inc(),
        )

    async def chat_completions(self, request: Request) -> Response:
        body = parse(ChatRequest, await read_body(request, self.limits))
        model, ready = self._decoder(body.model)
        asked = _tools(body)
        form = asked.grammar(model.tool_format)
        text = prompt_text(
            model.template,
            body.messages,
            asked,
            add_generation_prompt=body.add_generation_prompt,
            extra=body.chat_template_kwargs,
        )
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wanted = Wanted(
            n=body.n,
            max_tokens=getattr(body, limit),
            max_tokens_param=limit,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            form=(form, "tools") if form else form_of(body.structured_outputs, body.response_format),
            stops=model.template.stops,
        )
        id = _new_id("chatcmpl")
        special = model.template.plain
        prepared = await prepare(id, body, [text], wanted, model, ready, special=special, param="messages")
        usage = bool(body.stream_options and body.stream_options.include_usage)
        facts = self._facts(request, id, body, prepared, model, ready, usage=usage)
        parsers = asked.parsers(model.tool_format, body.n)
        answer = ChatAnswer(facts, logprobs=body.logprobs, parsers=parsers)
        return await self._respond(request, body, facts, answer)

    async def completions(self, request: Request) -> Response:
        body = parse(CompletionRequest, await read_body(request, self.limits))
        model, ready = self._decoder(body.model)
        if body.stream and body.echo and body.logprobs is not None:
            raise invalid("echo with logprobs is not streamed", "stream", "unsupported_parameter")
        wanted = Wanted(
            n=body.n,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            form=form_of(body.structured_outputs, body.response_format),
        )
        id = _new_id("cmpl")
        prepared = await prepare(id, body, body.prompts, wanted, model, ready, special=True, param="prompt")
        usage = bool(body.stream_options and body.stream_options.include_usage)
        facts = self._facts(request, id, body, prepared, model, ready, usage=usage)
        echo = [submit.ids for submit in prepared.submits] if body.echo else None
        answer = CompletionAnswer(facts, echo=echo, logprobs=body.logprobs is not None)
        return await self._respond(request, body, facts, answer)

    async def responses(self, request: Request) -> Response:
        body = parse(ResponsesRequest, await read_body(request, self.limits))
        model, ready = self._decoder(body.model)
        asked = body.asked_tools
        form = asked.grammar(model.tool_format)
        wanted = Wanted(
            max_tokens=body.max_output_tokens,
            max_tokens_param="max_output_tokens",
            form=(form, "tools") if form else form_of(body.structured_outputs, body.response_format),
            stops=model.template.stops,
        )
        text = prompt_text(model.template, body.messages(), asked)
        id = _new_id("resp")
        special = model.template.plain
        prepared = await prepare(id, body, [text], wanted, model, ready, special=special, param="input")
        facts = self._facts(request, id, body, prepared, model, ready, usage=True)
        answer = ResponseAnswer(facts, body, asked.parsers(model.tool_format, 1))
        return await self._respond(request, body, facts, answer)

    async def embeddings(self, request: Request) -> Response:
        body = parse(EmbeddingRequest, await read_body(request, self.limits))
        ready = self._ready(body.model)
        if ready.kind != "encoder":
            raise invalid(
                "the served model is a language model and has no embeddings", code="wrong_model_kind"
            )
        _record(request).user = body.user
        texts = [body.input] if isinstance(body.input, str) else body.input
        found = await self._embed(texts)
        data = [
            {"object": "embedding", "index": index, "embedding": _vector(vector, body.encoding_format)}
            for index, vector in enumerate(found.vectors)
        ]
        usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
        return Json({"object": "list", "data": data, "model": self.name, "usage": usage})

    async def models(self, request: Request) -> Response:
        return Json({"object": "list", "data": [self._described()]})

    async def model_facts(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return Json(self._described())

    async def tokenize(self, request: Request) -> Response:
        body = parse(TokenizeRequest, await read_body(request, self.limits))
        model, ready = self._decoder(body.model)
        text, special, param = body.prompt, body.add_special_tokens, "prompt"
        if body.messages is not None:
            none = Tools(functions=(), choice="none")
            start = body.add_generation_prompt
            text = prompt_text(model.template, body.messages, none, add_generation_prompt=start)
            special, param = model.template.plain, "messages"
        assert text is not None, "the request has a prompt or messages"
        ids = await encode(text, model, special=special, param=param)
        strings = [model.tokenizer.token(id)[0] for id in ids] if body.return_token_strs else None
        return Json({"count": len(ids), "max_model_len": ready.context, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeRequest, await read_body(request, self.limits))
        model, ready = self._decoder(body.model)
        wrong = next((token for token in body.tokens if token >= ready.vocabulary), None)
        if wrong is not None:
            raise invalid(
                f"'tokens': {wrong} is out of range; the model has 0 to {ready.vocabulary - 1}", "tokens"
            )
        return Json({"prompt": model.tokenizer.decode(body.tokens, special=True)})

    async def health(self, request: Request) -> Response:
        client = self.client
        status = 503 if client.state == "failed" else 200
        return Json({"status": client.state, "detail": client.detail, "model": self.name}, status_code=status)

    async def ready(self, request: Request) -> Response:
        status = 200 if self.client.state == "ready" else 503
        return Json({"ready": status == 200, "detail": self.client.detail}, status_code=status)

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return Json(document(OPERATIONS, keys=bool(self.keys)))

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text("utf-8"), headers={"content-security-policy": PAGE_POLICY})

    def _facts(
        self,
        request: Request,
        id: str,
        body: Shared,
        prepared: Prepared,
        model: Model,
        ready: Ready,
        *,
        usage: bool,
    ) -> Facts:
        wanted = request.headers.get(TIMING_HEADER, "0").lower() in ("1", "true")
        return Facts(
            id=id,
            model=self.name,
            fingerprint=ready.fingerprint[:16],
            generation=Generation(prepared, self.client, model.tokenizer, self.metrics),
            tokenizer=model.tokenizer,
            usage=usage,
            timing=body.timing or wanted,
        )

    async def _respond(self, request: Request, body: Shared, facts: Facts, answer: Answer) -> Response:
        _record(request).user = body.user
        return await respond(request, facts.generation, answer, stream=body.stream, limits=self.limits)

    async def _embed(self, texts: list[str]) -> Embedded:
        id, mailbox = _new_id("embd"), self.client.mailbox()
        self.client.submit(Embed(id=id, texts=texts), mailbox)
        try:
            (found,) = await mailbox.take()
        finally:
            self.client.finish(id)
        if isinstance(found, Embedded):
            return found
        if isinstance(found, Refused):
            raise refusal(found)
        if isinstance(found, Lost):
            raise unavailable(found.reason)
        raise invalid(getattr(found, "text", "the texts cannot be embedded"), "input")

    def _decoder(self, name: str | None) -> tuple[Model, Ready]:
        """The language model that a request asks for; raises `ApiError` where it is another, or not ready."""
        ready = self._ready(name)
        if ready.kind != "decoder" or self.model is None:
            raise invalid(
                "the served model is a sentence encoder: use /v1/embeddings", code="wrong_model_kind"
            )
        return self.model, ready

    def _ready(self, name: str | None) -> Ready:
        self._check_model(name)
        if self.client.state != "ready" or self.client.ready is None:
            raise unavailable(f"the engine is not ready: {self.client.detail}")
        return self.client.ready

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"there is no model '{name}'; '{self.name}' is served",
                param="model",
                code="model_not_found",
            )

    def _described(self) -> dict[str, Any]:
        ready = self.client.ready
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "torchwright",
            "max_model_len": ready.context if ready else None,
        }


OPERATIONS = (
    Operation("POST", "/v1/chat/completions", "chat_completions", "Answer a conversation", ChatRequest),
    Operation("POST", "/v1/completions", "completions", "Continue texts", CompletionRequest),
    Operation("POST", "/v1/responses", "responses", "Answer, without anything stored", ResponsesRequest),
    Operation(
        "POST", "/v1/embeddings", "embeddings", "Embed texts with a sentence encoder", EmbeddingRequest
    ),
    Operation("GET", "/v1/models", "models", "The served model, as a list"),
    Operation("GET", "/v1/models/{model:path}", "model_facts", "The served model"),
    Operation("POST", "/tokenize", "tokenize", "Token ids of a text or conversation", TokenizeRequest),
    Operation("POST", "/detokenize", "detokenize", "The text of token ids", DetokenizeRequest),
    Operation("GET", "/health", "health", "What the engine is doing; answers while it loads"),
    Operation("GET", "/ready", "ready", "200 when requests are taken, else 503"),
    Operation("GET", "/metrics", "metrics_text", "Figures for Prometheus"),
    Operation("GET", "/openapi.json", "openapi", "This document"),
)


def _tools(body: ChatRequest) -> Tools:
    functions = [tool.function for tool in body.tools or []]
    choice = body.tool_choice or ("auto" if functions else "none")
    named = isinstance(choice, NamedTool)
    return Tools(
        functions=functions,
        choice=choice.function.name if isinstance(choice, NamedTool) else choice,
        named=named,
        parallel=body.parallel_tool_calls,
    )


def _vector(vector: list[float], form: str) -> list[float] | str:
    if form == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _at(path: str, handler: Handler) -> Handler:
    """The handler, with its path noted for the metrics."""

    async def noted(request: Request) -> Response:
        request.scope["route_path"] = path
        return await handler(request)

    return noted


def _record(request: Request) -> Record:
    return request.scope["record"]


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
