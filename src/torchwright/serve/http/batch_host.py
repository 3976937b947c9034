"""The server as its batches see it: rows go through the handlers of interactive requests, behind those."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from torchwright.serve.api_error import ApiError
from torchwright.serve.batches.lines import error_body
from torchwright.serve.batches.run import Reply
from torchwright.serve.http.guard import BATCHED, AccessRecord, Guard
from torchwright.serve.http.openapi import Handler
from torchwright.serve.http.service import Service
from torchwright.serve.ids import new_id
from torchwright.serve.openai.generation import Gone

log = logging.getLogger("torchwright.serve")
ALONE_SHARE, BUSY_SHARE = 2, 16
"""One in so many of the engine's places is for rows of batches: while nobody else is served, and while somebody is.
Half, so that an interactive request finds a place at once; a sixteenth, so that its steps are little longer."""
WHOLE_REQUESTS = 2
"""Rows of an encoder at the same time: one is computed, the next is read meanwhile."""
LOOK_SECONDS = 0.05
"""Between two looks at an engine that is restarted, which takes seconds."""


class BatchHost:
    """Answers rows of batches by a server's own handlers."""

    def __init__(self, service: Service, guard: Guard, handlers: Mapping[str, Handler]) -> None:
        """`handlers` are those of the endpoints that batches may name, by path."""
        self._service, self._guard, self._handlers = service, guard, handlers

    async def ask(self, path: str, body: bytes) -> Reply:
        id = new_id("req-")
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not given:
                await asyncio.Event().wait()  # a row has no client that could leave
            return given.pop()

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "record": AccessRecord(id=id, method="POST", path=path),
            "app": self._guard,
            BATCHED: True,
        }
        try:
            response = await self._handlers[path](self._service, Request(scope, receive))
            return Reply(status=response.status_code, body=bytes(response.body), request_id=id)
        except ApiError as error:
            fault = error
        except Gone as gone:
            fault = ApiError(500, str(gone), code="internal_error")
        except Exception:
            log.exception("%s: a fault in the server", id)
            fault = ApiError(500, "a fault in the server; its log has the traceback", code="internal_error")
        wait = float(fault.headers.get("Retry-After", "1"))
        return Reply(status=fault.status, body=error_body(fault), request_id=id, retry_after_s=wait)

    def places(self) -> int:
        client = self._service.client
        if client.state != "ready" or client.ready is None:
            return 0
        if client.ready.kind != "decoder":
            return WHOLE_REQUESTS
        return max(1, client.ready.max_running // (BUSY_SHARE if self._guard.answering else ALONE_SHARE))

    @property
    def life(self) -> int:
        return self._service.client.restarts

    async def ready(self, *, settled: bool) -> None:
        client, loop = self._service.client, asyncio.get_running_loop()
        life, since = -1, 0.0
        while True:
            if client.state != "ready":
                life = -1
            elif life != client.restarts:
                life, since = client.restarts, loop.time()
            # A settled engine dies no early death, of which four in a row end the server.
            if life >= 0 and (not settled or loop.time() - since > client.early_seconds):
                return
            await asyncio.sleep(LOOK_SECONDS)
