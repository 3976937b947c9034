"""One generation on its way to one client: whole, or as server-sent events while it is made.

A client that leaves is noticed at once, whatever is being awaited; one that does not read is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from torchwright.serve.api_error import ApiError
from torchwright.serve.http.guard import AccessRecord
from torchwright.serve.limits import Limits
from torchwright.serve.openai.answers import ResponseWriter
from torchwright.serve.openai.generation import ChoiceUpdate, Generation, Gone

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def respond(
    request: Request, generation: Generation, answer: ResponseWriter, *, stream: bool, limits: Limits
) -> Response:
    """The response to a generating request.

    What the engine refuses is raised before a stream begins, so that it has its own status. Raises `ApiError` and
    `Gone`.
    """
    watcher = asyncio.create_task(watch(request, generation.abandon))
    steps = generation.steps()
    record: AccessRecord = request.scope["record"]
    handed_over = False
    try:
        first = await anext(steps)
        if stream:
            handed_over = True
            return EventStream(generation, answer, first, steps, watcher, limits.unread_seconds)
        for step in first:
            answer.put(step)
        async for batch in steps:
            for step in batch:
                answer.put(step)
        return Json(answer.whole())
    finally:
        if not handed_over:
            watcher.cancel()
            await steps.aclose()
            _note(record, generation)


async def collect(request: Request, generation: Generation) -> list[ChoiceUpdate]:
    """Return all of a generation's updates. Raises `ApiError` and `Gone`."""
    watcher = asyncio.create_task(watch(request, generation.abandon))
    steps = generation.steps()
    try:
        return [step async for batch in steps for step in batch]
    finally:
        watcher.cancel()
        await steps.aclose()
        _note(request.scope["record"], generation)


class Json(Response):
    """Plain data as a JSON response."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


@dataclass
class EventStream(Response):
    """A response that sends events as they come and ends the generation when it cannot."""

    generation: Generation
    answer: ResponseWriter
    first: list[ChoiceUpdate]
    steps: AsyncGenerator[list[ChoiceUpdate], None]
    watcher: asyncio.Task[None]
    unread_seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            await send_part(send, self.unread_seconds, self.answer.begin() + self._events(self.first))
            async for batch in self.steps:
                if events := self._events(batch):
                    await send_part(send, self.unread_seconds, events)
            await send_part(send, self.unread_seconds, self.answer.end(), more=False)
        except ApiError as error:
            scope["record"].reason = error.message
            await send_part(
                send, self.unread_seconds, b"event: error\ndata: " + error.body() + b"\n\n", more=False
            )
        finally:
            self.watcher.cancel()
            await self.steps.aclose()
            _note(scope["record"], self.generation)

    def _events(self, steps: list[ChoiceUpdate]) -> bytes:
        return b"".join([self.answer.events(step) for step in steps])


async def send_part(send: Send, seconds: float, body: bytes, *, more: bool = True) -> None:
    """Send a part of a stream. Raises `Gone` where the client leaves it unread for so long."""
    try:
        async with asyncio.timeout(seconds):
            await send({"type": "http.response.body", "body": body, "more_body": more})
    except TimeoutError:
        raise Gone(f"slow reader: it left the stream unread for {seconds:g} s") from None


async def watch(request: Request, abandon: Callable[[str], None]) -> None:
    """Call `abandon` with the reason when the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    abandon("client disconnected")


def _note(record: AccessRecord, generation: Generation) -> None:
    """Return the generation's part of the request's log line."""
    totals = generation.totals
    record.prompt_tokens, record.new_tokens = totals.prompt_tokens, totals.completion_tokens
    record.reason = record.reason or "/".join(sorted(set(totals.finishes)))
