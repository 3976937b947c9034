"""A language model as a judge, in SGLang's form: how probable are some tokens right after each item."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from torchwright.serve.http.guard import record_of
from torchwright.serve.http.service import Service
from torchwright.serve.http.stream import Json, collect
from torchwright.serve.ids import new_id
from torchwright.serve.openai.generation import Generation
from torchwright.serve.openai.language import Prompts
from torchwright.serve.openai.prepare import Wanted, prepare
from torchwright.serve.openai.protocol import Shared
from torchwright.serve.openai.request_limits import check_ids, request_limits_of
from torchwright.serve.openai.scoring_request import ScoreRequest
from torchwright.serve.text.codec import Tokenizer


async def judge(service: Service, request: Request, body: ScoreRequest) -> Response:
    """Answer with one list of probabilities for each item, in the order of the labels."""
    model, ready = service.decoder(body.model)
    record_of(request).user = body.user
    labels = body.label_token_ids or []
    check_ids(labels, request_limits_of(ready), "label_token_ids")
    prompts = Prompts(_prompts(body, model.tokenizer), "items", special=True)
    wanted = Wanted(max_tokens=1, logprobs=0, logprob_ids=tuple(labels), continues=True)
    shared = Shared.model_validate({"model": body.model, "temperature": 0.0})
    begun = record_of(request).begun
    prepared = await prepare(new_id("score-"), shared, prompts, wanted, model, ready, begun=begun)
    generation = Generation(prepared, service.client, model.tokenizer, service.metrics, every_token=True)
    scores: dict[int, list[float]] = {}
    for step in await collect(request, generation):
        for scored in step.token_logprobs:
            scores[step.choice] = _scores(scored.asked, softmax=body.apply_softmax)
    tokens = prepared.prompt_tokens
    return Json(
        {
            "object": "scoring",
            "scores": [scores[place] for place in range(len(prepared.submits))],
            "model": service.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _prompts(body: ScoreRequest, tokenizer: Tokenizer) -> list[str] | list[list[int]]:
    """Return query and item of each pair together; where one is token ids, so is the whole."""
    query, items = body.query or "", body.items or []
    many = [items] if isinstance(items, str) else items
    pairs = [(item, query) if body.item_first else (query, item) for item in many]
    if isinstance(query, str) and all(isinstance(item, str) for item in many):
        return [f"{first}{second}" for first, second in pairs]
    return [
        [*_ids(first, tokenizer, special=True), *_ids(second, tokenizer, special=False)]
        for first, second in pairs
    ]


def _ids(text: str | Sequence[int], tokenizer: Tokenizer, *, special: bool) -> Sequence[int]:
    return tokenizer.encode(text, special=special) if isinstance(text, str) else text


def _scores(logprobs: Sequence[float], *, softmax: bool) -> list[float]:
    raised = [math.exp(logprob) for logprob in logprobs]
    if not softmax:
        return raised
    top = max(logprobs)
    raised = [math.exp(logprob - top) for logprob in logprobs]
    return [value / sum(raised) for value in raised]
