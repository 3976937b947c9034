"""The application: which path does what, and the requests that do not generate (those are in `generating.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Lifespan

from torchwright.serve.api_error import invalid, unavailable
from torchwright.serve.http import (
    about,
    batching,
    generating,
    native,
    painting,
    reference,
    scoring,
    transcribing,
    webpage,
    weights,
)
from torchwright.serve.http.adapters import load_lora_adapter, unload_lora_adapter
from torchwright.serve.http.embedding import embed, vector_of
from torchwright.serve.http.guard import Guard, held_body, record_of, while_there
from torchwright.serve.http.openapi import Operation, document
from torchwright.serve.http.service import Service
from torchwright.serve.http.stream import Json
from torchwright.serve.openai.adapter_request import LoadAdapterRequest, UnloadAdapterRequest
from torchwright.serve.openai.anthropic_request import CountTokensRequest, MessagesRequest
from torchwright.serve.openai.batch_request import BatchRequest, FileRequest
from torchwright.serve.openai.generate_request import GenerateRequest
from torchwright.serve.openai.image_request import ImageRequest
from torchwright.serve.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from torchwright.serve.openai.request_limits import request_limits_of
from torchwright.serve.openai.responses import ResponsesRequest
from torchwright.serve.openai.scoring_request import (
    ClassifyRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from torchwright.serve.openai.tokens import Asked
from torchwright.serve.openai.transcription_request import TranscriptionRequest, TranslationRequest
from torchwright.serve.openai.weights_request import (
    AbortRequest,
    ContinueRequest,
    FlushCacheRequest,
    NameWeightsRequest,
    PauseRequest,
    UpdateWeightsRequest,
)
from torchwright.serve.wire.metrics import CONTENT_TYPE

DOCS_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
STOPPING = "the server is stopping"


def application(service: Service, lifespan: Lifespan[Guard] | None = None) -> ASGIApp:
    """The ASGI application; `lifespan` starts and ends what it needs."""
    operations = (
        *OPERATIONS,
        Operation("GET", "/", webpage.index, "The chat page", before_ready=True),
        Operation("GET", "/page/{name}", webpage.file, "A file of the chat page", before_ready=True),
        Operation("GET", "/docs", docs, "The OpenAPI document as a page", before_ready=True),
    )
    routes = [
        Route(path, _bound(service, op), methods=[op.method])
        for op in operations
        for path in (op.path, *op.also)
    ]
    # Without Starlette's own layers: the guard answers for faults.
    inner = Router(routes, lifespan=lifespan)
    return Guard(
        inner,
        keys=service.keys,
        hosts=service.hosts,
        log_requests=service.log_requests,
        count=lambda path, status: service.metrics.requests.labels(path, str(status)).inc(),
    )


async def embeddings(service: Service, request: Request) -> Response:
    async with held_body(request, service.limits) as raw:
        body = await service.reader.request(EmbeddingRequest, raw)
    ready = service.ready(body.model)
    if ready.kind != "encoder":
        raise invalid("the served model is no sentence encoder", code="wrong_model_kind")
    record_of(request).user = body.user
    texts = [body.input] if isinstance(body.input, str) else body.input
    vectors, tokens = await embed(service, request, texts)
    data = [
        {"object": "embedding", "index": index, "embedding": vector_of(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return Json({"object": "list", "data": data, "model": service.name, "usage": usage})


async def tokenize(service: Service, request: Request) -> Response:
    return await _of_tokens(service, request, TokenizeRequest)


async def count_tokens(service: Service, request: Request) -> Response:
    return await _of_tokens(service, request, CountTokensRequest)


async def detokenize(service: Service, request: Request) -> Response:
    return await _of_tokens(service, request, DetokenizeRequest)


async def health(service: Service, request: Request) -> Response:
    client = service.client
    facts = {"status": client.state, "detail": client.detail, "model": service.name}
    return _state(facts, client.state == "ready")


async def ready(service: Service, request: Request) -> Response:
    client = service.client
    stands = client.state == "ready" and not service.stopping
    return _state({"ready": stands, "detail": STOPPING if service.stopping else client.detail}, stands)


async def metrics_text(service: Service, request: Request) -> Response:
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def openapi(service: Service, request: Request) -> Response:
    return Json(document(OPERATIONS, keys=bool(service.keys)))


async def docs(service: Service, request: Request) -> Response:
    # In a thread: the first one takes a tenth of a second, in which nobody else would be answered.
    text = await asyncio.to_thread(reference.page, OPERATIONS, keys=bool(service.keys))
    return HTMLResponse(text, headers={"content-security-policy": DOCS_POLICY})


OPERATIONS = (
    Operation(
        "POST", "/v1/chat/completions", generating.chat_completions, "Answer a conversation", ChatRequest
    ),
    Operation("POST", "/v1/completions", generating.completions, "Continue texts", CompletionRequest),
    Operation(
        "POST", "/v1/responses", generating.responses, "Answer, without anything stored", ResponsesRequest
    ),
    Operation("POST", "/v1/messages", generating.messages, "Answer, by Anthropic's API", MessagesRequest),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "Count a conversation's tokens, by Anthropic's API",
        CountTokensRequest,
    ),
    Operation("POST", "/v1/embeddings", embeddings, "Embed texts with a sentence encoder", EmbeddingRequest),
    Operation(
        "POST",
        "/v1/audio/transcriptions",
        transcribing.transcriptions,
        "Write down what is said in a sound file",
        TranscriptionRequest,
    ),
    Operation(
        "POST",
        "/v1/audio/translations",
        transcribing.translations,
        "The same in English",
        TranslationRequest,
    ),
    Operation("POST", "/v1/images/generations", painting.images, "Make pictures of a prompt", ImageRequest),
    Operation(
        "POST",
        "/v1/rerank",
        scoring.rerank,
        "Order documents by a query, with a cross-encoder or a sentence encoder",
        RerankRequest,
        also=("/rerank", "/v2/rerank"),
    ),
    Operation(
        "POST",
        "/v1/score",
        scoring.score,
        "Score pairs of texts with the same",
        ScoreRequest,
        also=("/score",),
    ),
    Operation(
        "POST",
        "/v1/classify",
        scoring.classify,
        "Classify texts, or judge a conversation with a reward model",
        ClassifyRequest,
        also=("/classify",),
    ),
    Operation(
        "POST",
        "/pooling",
        scoring.pooling,
        "Vectors of texts, or what a classifier or reward model says of them, in vLLM's form",
        PoolingRequest,
    ),
    Operation(
        "POST",
        "/v1/load_lora_adapter",
        load_lora_adapter,
        "Load an adapter below the folder of --allow-adapters",
        LoadAdapterRequest,
    ),
    Operation(
        "POST",
        "/v1/unload_lora_adapter",
        unload_lora_adapter,
        "Let an adapter go when its running requests have ended",
        UnloadAdapterRequest,
    ),
    Operation(
        "POST", "/generate", native.generate, "Continue texts or token ids, in SGLang's form", GenerateRequest
    ),
    Operation(
        "POST",
        "/flush_cache",
        native.flush_cache,
        "Empty the prefix cache, while nothing runs",
        FlushCacheRequest,
    ),
    Operation("GET", "/flush_cache", native.flush_cache_plainly, "The same without a body"),
    Operation(
        "POST",
        "/update_weights_from_disk",
        weights.update_weights_from_disk,
        "Go on with other weights, below the folder of --allow-weights",
        UpdateWeightsRequest,
        also=("/update_weights",),
    ),
    Operation(
        "POST",
        "/update_weight_version",
        weights.update_weight_version,
        "Name the weights in answers",
        NameWeightsRequest,
    ),
    Operation(
        "POST",
        "/pause_generation",
        weights.pause_generation,
        "Generate nothing until /continue_generation, with --allow-weights",
        PauseRequest,
        also=("/pause",),
    ),
    Operation(
        "POST",
        "/continue_generation",
        weights.continue_generation,
        "Go on generating",
        ContinueRequest,
        also=("/resume",),
    ),
    Operation(
        "POST",
        "/abort_request",
        weights.abort_request,
        "End a request with what it has, or all of them with --allow-weights",
        AbortRequest,
        also=("/abort",),
    ),
    Operation(
        "GET",
        "/weight_version",
        weights.weight_version,
        "The version of the weights",
        also=("/get_weight_version",),
    ),
    Operation(
        "POST", "/v1/files", batching.upload_file, "Leave a file of requests, with --batches", FileRequest
    ),
    Operation("GET", "/v1/files", batching.list_files, "The client's files", before_ready=True),
    Operation("GET", "/v1/files/{file_id}", batching.file_facts, "A file's name and size", before_ready=True),
    Operation("DELETE", "/v1/files/{file_id}", batching.delete_file, "Delete a file", before_ready=True),
    Operation(
        "GET", "/v1/files/{file_id}/content", batching.file_content, "A file itself", before_ready=True
    ),
    Operation(
        "POST",
        "/v1/batches",
        batching.create_batch,
        "Answer the requests of a file, behind interactive ones",
        BatchRequest,
    ),
    Operation("GET", "/v1/batches", batching.list_batches, "The client's batches", before_ready=True),
    Operation("GET", "/v1/batches/{batch_id}", batching.batch_facts, "How far a batch is", before_ready=True),
    Operation(
        "POST",
        "/v1/batches/{batch_id}/cancel",
        batching.cancel_batch,
        "End a batch with the answers that it has",
        before_ready=True,
    ),
    Operation("GET", "/v1/models", about.models, "The served model, as a list"),
    Operation("GET", "/v1/models/{model:path}", about.model_facts, "The served model"),
    Operation("POST", "/tokenize", tokenize, "Token ids of a text or conversation", TokenizeRequest),
    Operation("POST", "/detokenize", detokenize, "The text of token ids", DetokenizeRequest),
    Operation(
        "GET", "/health", health, "200 when requests are taken; what the engine is doing", before_ready=True
    ),
    Operation("GET", "/ready", ready, "200 when requests are taken, else 503", before_ready=True),
    Operation("GET", "/health_generate", about.health_generate, "200 once the engine has computed a token"),
    Operation("GET", "/version", about.version_text, "Torchwright's version, in vLLM's form"),
    Operation(
        "GET",
        "/server_info",
        about.server_info,
        "How the model is served, in SGLang's form",
        also=("/get_server_info",),
    ),
    Operation(
        "GET",
        "/model_info",
        about.model_info,
        "What the model is, in SGLang's form",
        also=("/get_model_info",),
    ),
    Operation(
        "GET",
        "/v1/loads",
        about.loads,
        "Running and waiting requests, in SGLang's form",
        also=("/loads",),
    ),
    Operation("GET", "/get_load", about.get_load, "The same in SGLang's older form"),
    Operation("GET", "/load", about.load, "Requests that have not been answered, in vLLM's form"),
    Operation("GET", "/metrics", metrics_text, "Figures for Prometheus", before_ready=True),
    Operation("GET", "/openapi.json", openapi, "This document", before_ready=True),
)

BATCHED = {each.path: each.handler for each in OPERATIONS if each.path in batching.BATCH_PATHS}
"""The handlers of rows of batches."""


async def _of_tokens(service: Service, request: Request, kind: type[Asked]) -> Response:
    model, ready = service.chat(None) if kind is CountTokensRequest else service.decoder(None)
    async with held_body(request, service.limits) as body:
        answering = service.reader.answer(kind, body, model, request_limits_of(ready, *service.names))
        here = service.reader.reads_here(kind, body, model)
        found = await (answering if here else while_there(request, answering))
    return Response(found, media_type="application/json")


def _state(facts: dict[str, Any], stands: bool) -> Response:
    """Answer with the server's state: 200 while it stands, else 503."""
    if stands:
        return Json(facts)
    return Json(facts, status_code=503, headers=unavailable("the server is not ready").headers)


def _bound(service: Service, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    """The handler of one service, with its path noted for the metrics."""

    async def noted(request: Request) -> Response:
        request.scope["route_path"] = operation.path
        if not operation.before_ready:
            if service.refuses and operation.method == "POST":  # a gateway goes on looking
                raise unavailable(STOPPING)
            service.engine()
        return await operation.handler(service, request)

    return noted
