"""OpenAI's batch files: a request a line in, an answer a line out, errors in a file of their own.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
{"id": "batch_req_…", "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {…}}, "error": null}
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from torchwright.map.tasks.base import Answer, Rejected, Task, TaskSpec
from torchwright.map.tasks.generate import engine_options
from torchwright.map.tasks.texts import TextReader
from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.offline.requests import KINDS, Asked, OfflineServer
from torchwright.serve.openai.parse import parse
from torchwright.serve.openai.protocol import EmbeddingRequest

EMBEDDINGS = "/v1/embeddings"


class RequestBatch(Task):
    """Chat completions, completions and responses of a language model."""

    def __init__(self, spec: TaskSpec) -> None:
        self._server = OfflineServer(engine_options(spec.model), spec.name)
        self.notices = self._server.engine.ready.notices

    def answer(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Answer]]:
        good, requests = list[int](), list[Asked]()
        for place, row in enumerate(rows):
            try:
                requests.append(_asked(row, tuple(KINDS)))
                good.append(place)
            except ApiError as error:
                yield place, _failed(row, error)
        for place, found in zip(good, self._server.answer(requests), strict=True):
            yield (
                place,
                _failed(rows[place], found)
                if isinstance(found, ApiError)
                else _line(rows[place], 200, found),
            )

    def close(self) -> None:
        self._server.close()


class EmbeddingBatch(Task):
    """Embeddings of a sentence encoder; the texts of all requests of a part are read together."""

    def __init__(self, spec: TaskSpec) -> None:
        self._reader, self._name = TextReader(spec), spec.name
        self.notices = self._reader.notices

    def answer(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Answer]]:
        bodies, texts = dict[int, tuple[EmbeddingRequest, range]](), list[str]()
        for place, row in enumerate(rows):
            try:
                body = parse(EmbeddingRequest, _asked(row, (EMBEDDINGS,)).body)
                asked = [body.input] if isinstance(body.input, str) else body.input
                if not all(asked):
                    raise invalid("one of the texts is empty", "input")
                if body.model not in (None, self._name):
                    raise ApiError(404, f"there is no model '{body.model}'; '{self._name}' is", param="model")
            except ApiError as error:
                yield place, _failed(row, error)
                continue
            bodies[place] = body, range(len(texts), len(texts) + len(asked))
            texts += asked
        found = dict(self._reader.read(texts)) if texts else {}
        lengths = self._reader.lengths(texts) if texts else []
        for place, (body, own) in bodies.items():
            vectors = [found[number] for number in own]
            if fault := next((row for row in vectors if isinstance(row, Rejected)), None):
                yield place, _failed(rows[place], invalid(fault.reason, "input"))
                continue
            data = [
                {"object": "embedding", "index": index, "embedding": _numbers(vector, body.encoding_format)}
                for index, vector in enumerate(vectors)
            ]
            tokens = sum(lengths[number] for number in own)
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            answer = {"object": "list", "data": data, "model": self._name, "usage": usage}
            yield place, _line(rows[place], 200, answer)


def _asked(row: dict[str, Any], urls: Sequence[str]) -> Asked:
    """Return a line's request; raise `ApiError` for a line without one."""
    custom, method, url, body = (row.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom, str) or not custom:
        raise invalid("'custom_id' must be a text", "custom_id")
    if method != "POST":
        raise invalid(f"'method' must be POST, not {method!r}", "method")
    if url not in urls:
        raise ApiError(404, f"this model does not answer {url!r}; it answers {', '.join(urls)}", param="url")
    if not isinstance(body, dict):
        raise invalid("'body' must be an object", "body")
    return Asked(str(url), msgspec.json.encode(body))


def _line(row: dict[str, Any], status: int, body: Any) -> dict[str, Any]:
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": row.get("custom_id"),
        "response": {"status_code": status, "request_id": secrets.token_hex(12), "body": body},
        "error": None,
    }


def _failed(row: dict[str, Any], error: ApiError) -> Rejected:
    body = msgspec.json.decode(error.body())
    return Rejected(error.message, _line(row, error.status, {"error": body["error"]}))


def _numbers(vector: Any, form: str) -> list[float] | str:
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.float().numpy().astype("<f4").tobytes()).decode()
