"""Turn a request's body into a checked request and its prompts, in this or another process.

A short body is read in the HTTP process, unless the model's own chat template has to be rendered, which is an
untrusted program. Such a body, and a longer one, gets a process of its own (`read_worker.py`), where JSON, chat
template and tokenizer block no other request and can be ended. It returns the request without its prompts, and their
token ids.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

import msgspec

from torchwright.models.vision.record import Picture
from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.limits import Limits
from torchwright.serve.openai.anthropic_request import CountTokensRequest
from torchwright.serve.openai.language import Language, Prompts
from torchwright.serve.openai.parse import Body, parse
from torchwright.serve.openai.protocol import ChatRequest, TokenizeRequest
from torchwright.serve.openai.request_limits import RequestLimits, check_model
from torchwright.serve.openai.responses import ResponsesRequest
from torchwright.serve.openai.sampling_fields import Prompted
from torchwright.serve.openai.tokens import Asked, answer
from torchwright.serve.text.codec import Tokenizer
from torchwright.serve.workers.forks import NICE
from torchwright.serve.workers.pool import Unfinished, Workers, WorkLimits

Generating = TypeVar("Generating", bound=Prompted)
Known = TypeVar("Known", bound=Body)
LONG_TEXT = 2048
"""Characters from which on a text is tokenized in a thread: it takes a millisecond."""
RENDER = "render"
"""The kind of a job that renders the conversation of a `ClassifyRequest`."""
RENDERED = (ChatRequest, ResponsesRequest, CountTokensRequest, TokenizeRequest)
"""Requests whose messages go through the chat template."""
IDS = "I"
"""The encoding of token ids between processes: unsigned numbers of 32 bits."""


class ReadingJob(msgspec.Struct, frozen=True):
    """A body to be read in the other process: the name of its class, and what it must fit, but for embeddings."""

    kind: str
    body: bytes
    limits: RequestLimits | None
    fetched: dict[str, bytes] = {}
    """The contents of the body's http(s) URLs."""


class Wanted(msgspec.Struct, frozen=True, tag="wanted"):
    """The http(s) URLs of a body, which is read again with their contents."""

    urls: list[str]


class Read(msgspec.Struct, frozen=True, tag="read"):
    """A request that was read there, with its prompts' token ids and field; or its answer."""

    body: bytes
    prompts: list[bytes] = []
    param: str = ""
    noted: list[str] = []
    """Fields that were taken without effect."""
    pictures: list[Picture] = []
    """Those of the one prompt."""


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """The error for the client instead."""

    status: int
    message: str
    param: str | None
    code: str | None


Fetch = Callable[[Sequence[str]], AbstractAsyncContextManager[dict[str, bytes]]]
"""Gives the contents of URLs, whose memory is accounted for until the block ends; raises `ApiError`."""


class BodyReader:
    """Reads bodies; without `tokenizes` their texts are the engine's to tokenize."""

    def __init__(self, folder: Path, limits: Limits, *, tokenizes: bool, fetch: Fetch) -> None:
        self._limits, self._fetch = limits, fetch
        self.workers = Workers(
            "torchwright.serve.http.read_worker",
            [str(folder), tokenizes, limits.settings_bytes, limits.tokenized_bytes],
            WorkLimits(
                seconds=limits.read_seconds,
                quick_seconds=limits.read_quick_seconds,
                memory_bytes=limits.read_memory_bytes,
                waiting=limits.reads_waiting,
            ),
        )

    def reads_here(self, kind: type[Body], body: bytes, language: Language) -> bool:
        """Check whether a body is read at once: it is short, and needs no untrusted template and no pictures."""
        plain = language.template.plain and language.pictures is None
        return self._is_short(body) and (plain or not issubclass(kind, RENDERED))

    async def request(self, kind: type[Known], body: bytes) -> Known:
        """A request that has no prompts to be tokenized here; raises `ApiError` as `parse` does."""
        if not self._is_short(body):
            body = (await self._apart(ReadingJob(kind.__name__, body, None))).body
        return parse(kind, body)

    async def conversation(self, body: bytes) -> str:
        """Return the text of a `ClassifyRequest`'s conversation by the chat template; raise `ApiError`."""
        read = await self._apart(ReadingJob(RENDER, body, None), short=self._is_short(body))
        return read.body.decode()

    async def generating(
        self, kind: type[Generating], body: bytes, language: Language, limits: RequestLimits
    ) -> tuple[Generating, Prompts]:
        """A request and its prompts; raises `ApiError` for what is wrong with either."""
        if self.reads_here(kind, body, language):
            found = parse(kind, body)
            check_model(found.model, limits.models)
            return found, found.read(language)
        read = await self._apart(ReadingJob(kind.__name__, body, limits), short=self._is_short(body))
        ids = [array(IDS, prompt).tolist() for prompt in read.prompts]
        found = parse(kind, read.body)
        found.noted[:] = read.noted
        return found, Prompts(ids, read.param, special=False, pictures=read.pictures)

    async def answer(
        self,
        kind: type[Asked],
        body: bytes,
        language: Language,
        limits: RequestLimits,
    ) -> bytes:
        """The answer of a request that needs no engine, as JSON; raises `ApiError`."""
        if not self.reads_here(kind, body, language):
            job = ReadingJob(kind.__name__, body, limits)
            return (await self._apart(job, short=self._is_short(body))).body
        found = parse(kind, body)
        check_model(found.model, limits.models)
        return await asyncio.to_thread(answer, found, language, limits, self._limits.tokenized_bytes)

    def _is_short(self, body: bytes) -> bool:
        return len(body) <= self._limits.read_here_bytes

    async def _apart(self, job: ReadingJob, *, short: bool = False) -> Read:
        """Read a body in the other process, and again with the contents of its URLs if it has any."""
        found = await self._run(job, short=short)
        if isinstance(found, Read):
            return found
        async with self._fetch(found.urls) as fetched:
            found = await self._run(msgspec.structs.replace(job, fetched=fetched), short=False)
        assert isinstance(found, Read), "every URL was fetched"
        return found

    async def _run(self, job: ReadingJob, *, short: bool) -> Read | Wanted:
        """Do one job; many short ones may wait, and none gives way to the engine."""
        waiting = self._limits.renders_waiting if short else None
        try:
            answer = await self.workers.run(
                msgspec.msgpack.encode(job), waiting=waiting, nice=0 if short else NICE
            )
        except Unfinished as unfinished:
            raise invalid(f"the request cannot be read: {unfinished}", code="request_limit") from None
        found = msgspec.msgpack.decode(answer, type=Read | Wanted | Fault)
        if isinstance(found, Fault):
            raise ApiError(found.status, found.message, param=found.param, code=found.code)
        return found


async def encode(text: str, tokenizer: Tokenizer, *, special: bool) -> list[int]:
    """Token ids of a text; a longer one's in a thread."""
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, special=special)
    return await asyncio.to_thread(tokenizer.encode, text, special=special)
