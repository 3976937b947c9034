"""One connection: uvicorn's, with limits on how many there are, how slowly headers may come and how small chunks."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchwright.serve.api_error import ApiError
from torchwright.serve.limits import Limits
from torchwright.serve.log import Once

log = logging.getLogger("torchwright.serve")

READ_BYTES = 16 * 1024
"""Bytes per read, which bound the work for one connection before another's turn."""
SMALL_CHUNK = 256
"""Bytes of a chunk, below which reading its head costs more than what it brings; a few are nothing."""
_SMALL = re.compile(rb"\r\n[0-9a-fA-F]{1,2}\r\n")


def connection_class(limits: Limits) -> type[H11Protocol]:
    """Return the protocol that uvicorn makes for each connection."""
    crowded = Once(log)

    class Connection(H11Protocol):
        _headers_due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.app = _abortable(self.app, transport)
            transport.max_size = READ_BYTES  # asyncio's own name for it
            if len(self.connections) > limits.connections:
                self._end(ApiError(503, f"more than {limits.connections} connections are open"), crowded)
            else:
                self._expect_headers()

        def data_received(self, data: bytes) -> None:
            if (
                len(data) > SMALL_CHUNK
                and self._body_is_chunked()
                and len(_SMALL.findall(data)) > len(data) // SMALL_CHUNK
            ):
                self._end(ApiError(400, "the body comes in chunks of a few bytes", code="invalid_http"))
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._headers_came()
            elif self._headers_due is None:
                self._expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_came()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self._end(ApiError(400, "this is no HTTP request that can be read", code="invalid_http"))

        def _body_is_chunked(self) -> bool:
            """Check whether a body is being read whose lines may be heads of chunks; in others they are content."""
            return self.conn.their_state is h11.SEND_BODY and any(
                name == b"transfer-encoding" for name, _ in self.headers
            )

        def _expect_headers(self) -> None:
            self._headers_due = self.loop.call_later(limits.header_seconds, self._too_slow)

        def _headers_came(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None

        def _too_slow(self) -> None:
            text = f"the headers did not come within {limits.header_seconds:g} s"
            self._end(ApiError(408, text, code="timeout"))

        def _end(self, error: ApiError, once: Once | None = None) -> None:
            """Answer without the application, and close; `once` logs what may come in thousands."""
            self._headers_came()
            (once or log).warning(f"{self.client}: {error.message}")
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            if not self.transport.is_closing():
                self.transport.write(head.encode() + body)
                self.transport.close()

    return Connection


def _abortable(app: Any, transport: Any) -> ASGIApp:
    """Wrap the application with a way to drop the connection without waiting for its reader."""

    async def app_with_abort(scope: Scope, receive: Receive, send: Send) -> None:
        scope["abort"] = transport.abort
        await app(scope, receive, send)

    return app_with_abort
