"""The requests that bring a sound, in the order of their journey; like OpenAI's of the same paths."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from torchwright.models.speech.transcript import Options, Window
from torchwright.serve.api_error import ApiError
from torchwright.serve.http.guard import while_there
from torchwright.serve.http.service import Service
from torchwright.serve.http.stream import STREAM_HEADERS, send_part, watch
from torchwright.serve.http.upload import read_form
from torchwright.serve.ids import new_id
from torchwright.serve.openai.generation import expect
from torchwright.serve.openai.parse import checked
from torchwright.serve.openai.transcription_answer import TranscriptionAnswer
from torchwright.serve.openai.transcription_request import TranscriptionRequest, TranslationRequest
from torchwright.serve.wire.mailbox import Dropped
from torchwright.serve.wire.messages import Heard, Transcribe


async def transcriptions(service: Service, request: Request) -> Response:
    return await _answer(service, request, TranscriptionRequest)


async def translations(service: Service, request: Request) -> Response:
    return await _answer(service, request, TranslationRequest)


async def _answer(service: Service, request: Request, kind: type[TranslationRequest]) -> Response:
    sounds = service.recognizer()
    async with contextlib.AsyncExitStack() as kept:
        place = await kept.enter_async_context(sounds.place())
        form = await read_form(request, place.upload, service.limits, place.hold)
        body = checked(kind, form.fields)
        service.check_model(body.model)
        notices = await while_there(request, place.read())
        windows = hear(service, request, str(place.samples), body.options())
        await kept.enter_async_context(contextlib.aclosing(windows))
        answer, first = TranscriptionAnswer(body, notices), await anext(windows)
        if body.stream:  # what the model refuses has been raised
            return _Events(answer, first, windows, kept.pop_all(), service.limits.unread_seconds)
        answer.put(first)
        async for window in windows:
            answer.put(window)
        return Response(answer.whole(), media_type=answer.media_type, headers=answer.headers())


async def hear(
    service: Service, request: Request, samples: str, options: Options
) -> AsyncGenerator[Window, None]:
    """The windows of a file of samples, as they are found.

    Raises `ApiError` when the engine refuses it, fails or dies, and `Gone` when the client leaves; the rest is then not
    transcribed.
    """
    client, id = service.client, new_id("hear-")
    mailbox, ended = client.mailbox(), False
    watcher = asyncio.create_task(watch(request, lambda reason: mailbox.put(Dropped(reason))))
    client.submit(Transcribe(id=id, samples=samples, options=options), mailbox)
    try:
        while not ended:
            for item in await mailbox.take():
                window = expect(item, Heard).window
                ended = window is None
                if window is not None:
                    yield window
    finally:
        watcher.cancel()
        if not ended:
            client.cancel(id, "abandoned")
        client.finish(id)


@dataclass
class _Events(Response):
    """A response that sends text as it is found, and keeps the request's files until its end."""

    answer: TranscriptionAnswer
    first: Window
    windows: AsyncGenerator[Window, None]
    kept: contextlib.AsyncExitStack
    unread_seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.kept:
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            try:
                await send_part(send, self.unread_seconds, self.answer.put(self.first))
                async for window in self.windows:
                    await send_part(send, self.unread_seconds, self.answer.put(window))
                await send_part(send, self.unread_seconds, self.answer.end(), more=False)
            except ApiError as error:
                scope["record"].reason = error.message
                await send_part(
                    send, self.unread_seconds, b"event: error\ndata: " + error.body() + b"\n\n", more=False
                )
