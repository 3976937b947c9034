"""The chat page: plain files, which browsers keep and ask for again by their digests (ETag)."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from torchwright.serve.api_error import ApiError
from torchwright.serve.http.service import Service

FOLDER = Path(__file__).parent / "page"
INDEX = "index.htm"
TYPES = {
    ".htm": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Scripts of this server only, and no text that becomes HTML or script: whatever a model writes stays text."""


@dataclass(frozen=True)
class PageFile:
    """A file of the page as it is sent."""

    body: bytes
    media_type: str
    etag: str


async def index(service: Service, request: Request) -> Response:
    """Answer with the page itself."""
    return await _sent(request, INDEX)


async def file(service: Service, request: Request) -> Response:
    """Answer with a script, a style sheet or the icon."""
    return await _sent(request, request.path_params["name"])


@cache
def files() -> dict[str, PageFile]:
    """Return the files of the page by name; read once, because they are part of the package."""
    found = {}
    for path in FOLDER.iterdir():
        body = path.read_bytes()
        found[path.name] = PageFile(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


async def _sent(request: Request, name: str) -> Response:
    # In a thread: the first request reads the files.
    found = (await asyncio.to_thread(files)).get(name)
    if found is None:
        raise ApiError(404, f"the page has no file '{name}'", code="not_found")
    # no-cache: kept, and asked for again each time, so that no browser mixes files of two versions.
    headers = {
        "etag": found.etag,
        "cache-control": "no-cache",
        "content-security-policy": POLICY,
        "referrer-policy": "no-referrer",
    }
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if found.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(found.body, media_type=found.media_type, headers=headers)
