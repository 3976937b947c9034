"""Per-request middleware: id, auth or host check, body limits, OpenAI's error format, access log.

No request ends without a reason: `AccessRecord.reason` is what the log says where something went wrong, and of every
request with `--log-requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchwright.core.request_line import RequestEntry
from torchwright.serve.api_error import ApiError
from torchwright.serve.http.hosts import Hosts
from torchwright.serve.limits import Limits
from torchwright.serve.log import one_line
from torchwright.serve.openai.generation import Gone

log = logging.getLogger("torchwright.serve")
Result = TypeVar("Result")

OPEN = frozenset({"/", "/docs", "/health", "/ready"})
"""Paths that need no key: they tell whether the server is there, and what any Torchwright server takes."""
PAGE_FILES = "/page/"
"""The chat page's files need no key either: the page is where one is entered."""
PROBES = frozenset({"/health", "/ready"})
"""Paths that are asked again and again, by a gateway every second: what the engine is doing is said once."""
GONE = 499
"""In the log and the metrics: the client left before its answer."""
UNROUTED = {404: "there is no such path", 405: "the method is not for this path"}
PATH_CHARACTERS = 256
"""Longest part of a request's path in the log and in errors."""
IGNORED = b"x-torchwright-ignored"
"""The header that names the fields of a request that were taken without effect."""
WEIGHTS = b"x-torchwright-weight-version"
"""The header with the version of the weights when an answer begins, where clients may change them."""
BATCHED = "batched"
"""In the scope of a request that is a row of a batch."""
DISCARDED = 32
"""A body that is too large is read to its end, so that the client reads the refusal, up to so many times the limit."""


@dataclass
class AccessRecord:
    """The access-log entry of one request."""

    id: str
    method: str
    path: str
    begun: float = field(default_factory=time.perf_counter)
    status: int = 0
    reason: str = ""
    user: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    ignored: tuple[str, ...] = ()
    """Fields that were taken without effect."""
    weight_version: Callable[[], str] | None = None
    """Gives the version of the weights when the answer begins, where they may change."""

    def __str__(self) -> str:
        entry = RequestEntry(
            id=self.id,
            method=self.method,
            path=self.path,
            status=self.status,
            reason=self.reason,
            seconds=time.perf_counter() - self.begun,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            user=self.user,
        )
        return str(entry)


class Guard:
    """The outermost layer of the application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        hosts: Hosts,
        log_requests: bool,
        count: Callable[[str, int], None],
    ) -> None:
        self._app, self._log_requests, self._count = app, log_requests, count
        self._keys, self._hosts = [key.encode() for key in keys], hosts
        self.held_bytes = 0
        """Bytes of long bodies that were received but not read yet."""
        self.answering = 0
        """Requests of clients that send a body and have not been answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            scope["app"] = self  # a lifespan is given it
            await self._app(scope, receive, send)
            return
        record = AccessRecord(
            id=f"req-{secrets.token_hex(12)}",
            method=scope["method"],
            path=one_line(scope["path"], PATH_CHARACTERS),
        )
        scope["record"], scope["app"] = record, self

        async def send_known(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", record.id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    *self._hosts.cors(Headers(scope=scope)),
                ]
                if record.ignored:
                    message["headers"].append((IGNORED, ", ".join(record.ignored).encode()))
                if record.weight_version is not None:
                    message["headers"].append((WEIGHTS, record.weight_version().encode()))
            await send(message)

        headers = Headers(scope=scope)
        asks = scope["method"] == "OPTIONS" and not _two_lengths(headers)
        if asks and (preflight := self._hosts.preflight(headers)):
            await send_known({"type": "http.response.start", "status": 204, "headers": preflight})
            await send_known({"type": "http.response.body", "body": b""})
            return
        sends = scope["method"] == "POST"
        self.answering += sends
        try:
            fault = await self._fault(scope, receive, send_known, record)
        finally:
            self.answering -= sends
        if fault is not None:
            record.reason = fault.message
            if not record.status:
                await _refuse(fault, send_known)
        self._count(str(scope.get("route_path", "other")), record.status)
        if (self._log_requests or record.status >= 400) and scope["path"] not in PROBES:
            log.log(logging.WARNING if record.status >= 400 else logging.INFO, "%s", record)

    async def _fault(
        self, scope: Scope, receive: Receive, send: Send, record: AccessRecord
    ) -> ApiError | None:
        """Run the application; returns what it could not answer."""
        try:
            self._admit(scope)
            await self._app(scope, receive, send)
        except ApiError as error:
            return error
        except HTTPException as error:
            message = UNROUTED.get(error.status_code, error.detail)
            return ApiError(
                error.status_code, f"{record.method} {record.path}: {message}", headers=error.headers
            )
        except (Gone, ClientDisconnect, ConnectionError) as error:
            record.status, record.reason = GONE, str(error) or "client disconnected"
            scope["abort"]()  # what was sent already would be waiting for a reader otherwise
            await asyncio.sleep(0)  # until uvicorn knows
        except Exception:
            log.exception("%s: a fault in the server", record.id)
            return ApiError(500, "a fault in the server; its log has the traceback", code="internal_error")
        return None

    def _admit(self, scope: Scope) -> None:
        """Raise `ApiError` for a request without the key or, on a server without a key, to or from a foreign host."""
        headers = Headers(scope=scope)
        if _two_lengths(headers):
            raise ApiError(
                400,
                "the request has both Transfer-Encoding and Content-Length",
                code="invalid_http",
                headers={"connection": "close"},
            )
        if not self._keys:
            self._hosts.check(headers)
        elif scope["path"] not in OPEN and not scope["path"].startswith(PAGE_FILES):
            scope["key"] = self._checked_key(headers)

    def _checked_key(self, headers: Headers) -> bytes:
        """Return the key of a request; raise `ApiError` (401) for one that is not the server's."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")  # Anthropic's
        found = given.strip().encode("latin-1")
        # Every key is compared, in the same time whether it matches or not.
        if not any([hmac.compare_digest(found, known) for known in self._keys]):  # noqa: C419
            wrong = "wrong" if scheme or given else "missing"
            raise ApiError(
                401,
                f"the API key is {wrong}; send the header Authorization: Bearer KEY, or X-Api-Key",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found


@contextlib.asynccontextmanager
async def held_body(request: Request, limits: Limits) -> AsyncIterator[bytes]:
    """Yield the body of a JSON request; its memory is accounted for until the block ends.

    Raises `ApiError` for another content type (415), too many bytes (413), and a body that comes too slowly (408).
    If the long bodies of all requests take too much memory, the status is 429.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"the content type is '{kind}'; send application/json", code="unsupported_content_type"
        )
    guard: Guard = request.scope["app"]
    held = 0

    def hold(count: int) -> None:
        nonlocal held
        if guard.held_bytes + count > limits.bodies_bytes:
            raise ApiError(
                429, "too many long bodies are being read", code="queue_full", headers={"Retry-After": "1"}
            )
        guard.held_bytes += count
        held += count

    try:
        try:
            async with asyncio.timeout(limits.body_seconds):
                body = await _body(request, limits, hold)
        except TimeoutError:
            text = f"the body did not come within {limits.body_seconds:g} s"
            raise ApiError(408, text, code="timeout") from None
        yield body
    finally:
        guard.held_bytes -= held


async def while_there(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; cancel it and raise `Gone` if the client disconnects. Read the body first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone("client disconnected")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, limits: Limits, hold: Callable[[int], None]) -> bytes:
    body, size = bytearray(), 0  # one block that grows, and no holes in the memory where many pieces were
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limits.body_bytes:
            if size > limits.read_here_bytes:
                hold(len(chunk))
            body += chunk
        elif size > DISCARDED * limits.body_bytes:
            break
    if size > limits.body_bytes:
        raise ApiError(
            413, f"the body has more than {limits.body_bytes} bytes, which is the most", code="body_too_large"
        )
    return bytes(body)


async def _refuse(error: ApiError, send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    body = error.body()
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def record_of(request: Request) -> AccessRecord:
    """Return the access-log entry of a request, for additions."""
    return request.scope["record"]


def _two_lengths(headers: Headers) -> bool:
    """Check for a body of two lengths: a proxy in front may end the request elsewhere (request smuggling)."""
    return "transfer-encoding" in headers and "content-length" in headers
