"""Requests that are answered with numbers: classes (vLLM's form), scores (vLLM's) and ranks (Jina's and Cohere's)."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from torchwright.serve.api_error import invalid
from torchwright.serve.http.embedding import embed, vector_of
from torchwright.serve.http.guard import held_body, record_of
from torchwright.serve.http.judging import judge
from torchwright.serve.http.service import Service
from torchwright.serve.http.stream import Json
from torchwright.serve.ids import new_id
from torchwright.serve.openai.scoring_request import (
    Asked,
    ClassifyRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from torchwright.serve.wire.messages import Activation


async def classify(service: Service, request: Request) -> Response:
    async with held_body(request, service.limits) as raw:
        body = await service.reader.request(ClassifyRequest, raw)
        ready = service.ready(body.model)
        if ready.kind != "classifier":
            raise invalid("the served model is no classifier", code="wrong_model_kind")
        record_of(request).user = body.user
        texts, special = body.texts, True
        if body.messages is not None:
            if service.template.plain:
                raise invalid(
                    "the model has no chat template: give input", "messages", "unsupported_parameter"
                )
            texts, special = [await service.reader.conversation(raw)], False
    param = "input" if body.messages is None else "messages"
    rows, tokens = await embed(service, request, texts, body.seconds, special=special, param=param)
    if body.text is not None:
        id = new_id("classify-")
        found = [{"embedding": logits, "meta_info": {"id": f"{id}_{i}"}} for i, logits in enumerate(rows)]
        return Json(found[0] if isinstance(body.text, str) else found)
    data = []
    for index, logits in enumerate(rows):
        best = max(range(len(logits)), key=logits.__getitem__)
        data.append(
            {
                "index": index,
                "label": ready.labels[best],
                "probs": activated(logits, ready.activation) if body.use_activation else logits,
                "num_classes": len(logits),
            }
        )
    return _listed(service, "classify-", data, tokens)


async def score(service: Service, request: Request) -> Response:
    async with held_body(request, service.limits) as raw:
        body = await service.reader.request(ScoreRequest, raw)
    if body.label_token_ids is not None:
        return await judge(service, request, body)
    first, second = body.pairs
    scores, tokens = await _scores(service, request, body, first, second, param="text_2")
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return _listed(service, "score-", data, tokens)


async def pooling(service: Service, request: Request) -> Response:
    """Vectors of a sentence encoder, or what a classifier or reward model says of each of its labels."""
    async with held_body(request, service.limits) as raw:
        body = await service.reader.request(PoolingRequest, raw)
    ready = service.ready(body.model)
    if ready.kind not in ("encoder", "classifier"):
        raise invalid("the served model is no encoder and no classifier", code="wrong_model_kind")
    record_of(request).user = body.user
    rows, tokens = await embed(service, request, body.texts)
    if ready.kind == "classifier" and body.use_activation:
        rows = [activated(logits, ready.activation) for logits in rows]
    data = [
        {"index": index, "object": "pooling", "data": vector_of(row, body.encoding_format)}
        for index, row in enumerate(rows)
    ]
    return _listed(service, "pool-", data, tokens)


async def rerank(service: Service, request: Request) -> Response:
    async with held_body(request, service.limits) as raw:
        body = await service.reader.request(RerankRequest, raw)
    texts = body.texts
    scores, tokens = await _scores(
        service, request, body, [body.query] * len(texts), texts, param="documents"
    )
    best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": texts[index]}} if body.return_documents else {})
        for index in best
    ]
    return Json({"id": new_id("rerank-"), "model": service.name, "results": results, "usage": _usage(tokens)})


async def _scores(
    service: Service, request: Request, body: Asked, first: list[str], second: list[str], *, param: str
) -> tuple[list[float], int]:
    """One score for each pair, and the texts' tokens: a cross-encoder's, or the cosine of a sentence encoder's."""
    ready = service.ready(body.model)
    record_of(request).user = body.user
    if ready.kind == "encoder":
        texts = list(dict.fromkeys([*first, *second]))
        vectors, tokens = await embed(service, request, texts, param=param)
        known = dict(zip(texts, vectors, strict=True))
        return [_cosine(known[one], known[two]) for one, two in zip(first, second, strict=True)], tokens
    if ready.kind != "classifier" or len(ready.labels) != 1:
        raise invalid(
            "the served model gives no scores, as a cross-encoder with its one label does, or a sentence encoder",
            code="wrong_model_kind",
        )
    rows, tokens = await embed(service, request, first, second, param=param)
    activation = ready.score_activation if body.use_activation else "none"
    return [activated(logits, activation)[0] for logits in rows], tokens


def activated(logits: Sequence[float], activation: Activation) -> list[float]:
    """Apply a classifier's activation to its logits."""
    if activation == "none":
        return list(logits)
    if activation == "sigmoid":
        return [1 / (1 + math.exp(-logit)) if logit > -700 else 0.0 for logit in logits]
    top = max(logits)
    raised = [math.exp(logit - top) for logit in logits]
    return [value / sum(raised) for value in raised]


def _cosine(one: Sequence[float], two: Sequence[float]) -> float:
    product = sum(map(operator.mul, one, two))
    return product / max(math.hypot(*one) * math.hypot(*two), 1e-12)


def _listed(service: Service, prefix: str, data: list[dict[str, Any]], tokens: int) -> Response:
    """Return an answer's rows in vLLM's form."""
    answer = {"id": new_id(prefix), "object": "list", "created": int(time.time()), "model": service.name}
    return Json({**answer, "data": data, "usage": _usage(tokens)})


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
