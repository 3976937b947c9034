"""The process that reads long bodies: `python -m torchwright.serve.http.read_worker FD FACTS` (`forks.py`)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from torchwright.core.errors import ModelError
from torchwright.hub.chat_template import ChatTemplate
from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.limits import MIB
from torchwright.serve.openai.anthropic_request import CountTokensRequest, MessagesRequest
from torchwright.serve.openai.conversation import Tools, prompt_text
from torchwright.serve.openai.generate_request import GenerateRequest
from torchwright.serve.openai.image_request import ImageRequest
from torchwright.serve.openai.language import Language, load_language
from torchwright.serve.openai.parse import parse
from torchwright.serve.openai.picture_prompt import PicturesWanted, without_pictures
from torchwright.serve.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from torchwright.serve.openai.reading import IDS, RENDER, Fault, Read, ReadingJob, Wanted
from torchwright.serve.openai.request_limits import RequestLimits, check_ids, check_model, check_text
from torchwright.serve.openai.responses import ResponsesRequest
from torchwright.serve.openai.sampling_fields import Prompted
from torchwright.serve.openai.scoring_request import (
    ClassifyRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from torchwright.serve.openai.tokens import Asked, answer
from torchwright.serve.workers import forks
from torchwright.serve.workers.forks import within_limits

Plain = EmbeddingRequest | ClassifyRequest | PoolingRequest | ScoreRequest | RerankRequest | ImageRequest
KINDS: dict[str, type[Prompted | Asked | Plain]] = {
    kind.__name__: kind
    for kind in (
        ChatRequest,
        CompletionRequest,
        GenerateRequest,
        ResponsesRequest,
        EmbeddingRequest,
        TokenizeRequest,
        DetokenizeRequest,
        MessagesRequest,
        CountTokensRequest,
        ClassifyRequest,
        PoolingRequest,
        ScoreRequest,
        RerankRequest,
        ImageRequest,
    )
}
_job = msgspec.msgpack.Decoder(ReadingJob)
_encode = msgspec.msgpack.Encoder().encode


PARSE_SECONDS, PARSE_BYTES = 2.0, 256 * MIB
"""Limits for parsing a chat template; published ones take 20 ms and a few MB."""


def load(folder: str, tokenizes: bool, settings_bytes: int, tokenized_bytes: int) -> Callable[[bytes], bytes]:
    """Return the function that reads one body: a `ReadingJob` in MessagePack, to a `Read` or `Fault`."""
    language = load_language(Path(folder)) if tokenizes else None
    if language is not None and language.pictures is not None:
        try:
            language.pictures.load()  # seconds, and memory that all jobs share
            if fault := language.pictures.video_fault:
                print(f"videos are refused: {fault}", file=sys.stderr, flush=True)
        except ModelError as error:
            print(f"pictures are refused: {error}", file=sys.stderr, flush=True)
            language = replace(language, pictures=None)
    template = language.template if language else ChatTemplate(Path(folder), parse=False)
    # Parsed here it is shared by all jobs. A template that cannot be, within the limits, is left to each job's own.
    if within_limits(template.parse, PARSE_SECONDS, PARSE_BYTES):
        template.parse()

    def read(data: bytes) -> bytes:
        job = _job.decode(data)
        try:
            if job.kind == RENDER:
                return _encode(Read(_conversation(parse(ClassifyRequest, job.body), template).encode()))
            body = parse(KINDS[job.kind], job.body)
            if job.limits is None or language is None:
                # Variables of the template are read where it is rendered; half a million would hold the server.
                left = {"chat_template_kwargs"}
                return _encode(
                    Read(body.model_dump_json(by_alias=True, exclude_unset=True, exclude=left).encode())
                )
            check_model(body.model, job.limits.models)
            pictures = language.pictures if job.limits.pictures else None
            own = replace(language, pictures=pictures, fetched=job.fetched)
            if isinstance(body, Asked) and not isinstance(body, Prompted):
                return _encode(Read(answer(body, own, job.limits, tokenized_bytes)))
            assert isinstance(body, Prompted), job.kind
            return _encode(_read(body, own, job.limits, settings_bytes, tokenized_bytes))
        except PicturesWanted as wanted:
            return _encode(Wanted(list(wanted.urls)))
        except ApiError as error:
            return _encode(Fault(error.status, error.message, error.param, error.code))

    return read


def _conversation(body: ClassifyRequest, template: ChatTemplate) -> str:
    """Return the text of a conversation that has been answered."""
    none = Tools(functions=(), choice="none")
    messages, extra = body.messages or [], body.chat_template_kwargs
    without_pictures(messages, "messages")
    return prompt_text(template, messages, none, add_generation_prompt=False, extra=extra)


def _read(
    body: Prompted, language: Language, limits: RequestLimits, settings_bytes: int, tokenized_bytes: int
) -> Read:
    prompts = body.read(language)
    rows: list[bytes] = []
    for item in prompts.items:
        if isinstance(item, str):
            check_text(item, language.tokenizer, limits, tokenized_bytes, prompts.param)
            item = prompts.encode(item, language.tokenizer)
        check_ids(item, limits, prompts.param)
        rows.append(array(IDS, item).tobytes())
    bare = body.bare()
    if len(bare) > settings_bytes:
        raise invalid(
            f"the request has {len(bare)} bytes beside its prompt, and at most {settings_bytes} are taken"
        )
    return Read(bare, rows, prompts.param, body.noted, list(prompts.pictures))


if __name__ == "__main__":
    forks.main(sys.argv[1:], load)
