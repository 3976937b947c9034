"""The process that reads long bodies: `python -m torchwright.serve.http.read_worker FD PARENT FACTS` (`forks.py`)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec

from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.openai.anthropic_request import CountTokensRequest, MessagesRequest
from torchwright.serve.openai.image_request import ImageRequest
from torchwright.serve.openai.language import Language, load_language
from torchwright.serve.openai.parse import parse
from torchwright.serve.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Shared,
    TokenizeRequest,
)
from torchwright.serve.openai.reading import IDS, Fault, Read, ReadingJob
from torchwright.serve.openai.responses import ResponsesRequest
from torchwright.serve.openai.room import RequestRoom, check_ids, check_model, check_text
from torchwright.serve.openai.scoring_request import ClassifyRequest, RerankRequest, ScoreRequest
from torchwright.serve.openai.tokens import Asked, answer
from torchwright.serve.workers import forks

Plain = EmbeddingRequest | ClassifyRequest | ScoreRequest | RerankRequest | ImageRequest
KINDS: dict[str, type[Shared | Asked | Plain]] = {
    kind.__name__: kind
    for kind in (
        ChatRequest,
        CompletionRequest,
        ResponsesRequest,
        EmbeddingRequest,
        TokenizeRequest,
        DetokenizeRequest,
        MessagesRequest,
        CountTokensRequest,
        ClassifyRequest,
        ScoreRequest,
        RerankRequest,
        ImageRequest,
    )
}
_job = msgspec.msgpack.Decoder(ReadingJob)
_encode = msgspec.msgpack.Encoder().encode


def load(folder: str | None, settings_bytes: int, tokenized_bytes: int) -> Callable[[bytes], bytes]:
    """What reads one body: a `ReadingJob` in MessagePack, to a `Read` or `Fault`."""
    language = None if folder is None else load_language(Path(folder))

    def read(data: bytes) -> bytes:
        job = _job.decode(data)
        try:
            body = parse(KINDS[job.kind], job.body)
            if job.room is None or language is None:
                return _encode(Read(body.model_dump_json(by_alias=True, exclude_unset=True).encode()))
            check_model(body.model, job.room.models)
            if isinstance(body, Asked) and not isinstance(body, Shared):
                return _encode(Read(answer(body, language, job.room, tokenized_bytes)))
            assert isinstance(body, Shared), job.kind
            return _encode(_read(body, language, job.room, settings_bytes, tokenized_bytes))
        except ApiError as error:
            return _encode(Fault(error.status, error.message, error.param, error.code))

    return read


def _read(
    body: Shared, language: Language, room: RequestRoom, settings_bytes: int, tokenized_bytes: int
) -> Read:
    prompts = body.read(language)
    rows: list[bytes] = []
    for item in prompts.items:
        if isinstance(item, str):
            check_text(item, language.tokenizer, room, tokenized_bytes, prompts.param)
            item = language.tokenizer.encode(item, special=prompts.special)
        check_ids(item, room, prompts.param)
        rows.append(array(IDS, item).tobytes())
    bare = body.bare()
    if len(bare) > settings_bytes:
        raise invalid(
            f"the request has {len(bare)} bytes beside its prompt, and at most {settings_bytes} are taken"
        )
    return Read(bare, rows, prompts.param, body.noted)


if __name__ == "__main__":
    forks.main(sys.argv[1:], load)
