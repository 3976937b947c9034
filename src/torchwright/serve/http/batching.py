"""Files and batches over HTTP, by the paths and in the form of OpenAI's API: with --batches FOLDER alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.batches.records import StoredBatch, StoredFile, now
from torchwright.serve.batches.runner import Batches
from torchwright.serve.http.guard import held_body
from torchwright.serve.http.service import Service
from torchwright.serve.http.stream import Json
from torchwright.serve.http.upload import read_form
from torchwright.serve.ids import new_id
from torchwright.serve.openai.batch_request import BatchRequest, FileRequest
from torchwright.serve.openai.generation import Gone
from torchwright.serve.openai.parse import checked, parse

EXPIRES_AFTER = re.compile(r"expires_after\[(\w+)\]")
LONGEST = 64 * 1024
"""Bytes of a request for a batch: ids and metadata."""
CHUNK_BYTES = 256 * 1024
"""Read at once of a file on its way to a client."""
KEY_CHARACTERS = 255
"""The longest Idempotency-Key; other services take as many."""
FILES, MOST_FILES = 10_000, 10_000
BATCHES, MOST_BATCHES = 20, 100
"""Entries of a list where the client names no limit, and at most: OpenAI's own."""


async def upload_file(service: Service, request: Request) -> Response:
    batches, owner = _kept(service, request)
    with batches.store.incoming() as path:
        form = await read_form(request, path, service.limits, batches.store.hold)
        body = checked(FileRequest, _nested(form.fields))
        file = await asyncio.to_thread(
            batches.store.add,
            path,
            owner,
            purpose=body.purpose,
            filename=form.filename,
            seconds=body.expires_after.seconds if body.expires_after else service.limits.stored_seconds,
        )
    return Json(file.public())


async def list_files(service: Service, request: Request) -> Response:
    batches, owner = _kept(service, request)
    query = _query(request, "purpose", "order", most=MOST_FILES, default=FILES)
    current, purpose = now(), query.get("purpose")
    found = [
        file
        for file in batches.store.files.values()
        if file.owner == owner and file.expires > current and purpose in (None, file.purpose)
    ]
    return _listed(found, query)


async def file_facts(service: Service, request: Request) -> Response:
    return Json(_file(service, request)[1].public())


async def file_content(service: Service, request: Request) -> Response:
    batches, file = _file(service, request)
    return FileContent(batches.store.path(file), file, service.limits.unread_seconds)


async def delete_file(service: Service, request: Request) -> Response:
    batches, file = _file(service, request)
    await asyncio.to_thread(batches.store.delete, file)
    return Json({"id": file.id, "object": "file", "deleted": True})


async def create_batch(service: Service, request: Request) -> Response:
    batches, owner = _kept(service, request)
    async with held_body(request, service.limits) as raw:
        if len(raw) > LONGEST:
            raise invalid(f"the request has {len(raw)} bytes; at most {LONGEST} are read")
        body = parse(BatchRequest, raw)
    if made := _made_before(batches, owner, key := _idempotency_key(request), body):
        return Json(made.public())
    if body.endpoint not in (allowed := batch_endpoints(service)):
        raise invalid(
            f"the served model answers no batches of '{body.endpoint}', only of {', '.join(allowed) or 'none'}",
            "endpoint",
            "invalid_endpoint",
        )
    file = batches.store.file(body.input_file_id, owner)
    if file.purpose != "batch":
        raise invalid(f"the purpose of the file is '{file.purpose}', not 'batch'", "input_file_id")
    created, after = now(), body.output_expires_after
    batch = StoredBatch(
        id=new_id("batch_"),
        owner=owner,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created=created,
        expires=created + body.window_s,
        output_seconds=after.seconds if after else service.limits.stored_seconds,
        metadata=body.metadata,
        idempotency_key=key,
        model=service.name,
    )
    await batches.create(batch)
    return Json(batch.public())


def _idempotency_key(request: Request) -> str | None:
    """Return the header of that name; raises `ApiError` (400) for a long or an empty one."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= KEY_CHARACTERS:
        raise invalid(f"an Idempotency-Key has 1 to {KEY_CHARACTERS} characters, this one {len(key)}")
    return key


def _made_before(batches: Batches, owner: str, key: str | None, body: BatchRequest) -> StoredBatch | None:
    """Return the batch that the same request has made; raises `ApiError` (409) if another request has its key."""
    if key is None:
        return None
    for batch in batches.store.batches.values():
        if batch.owner == owner and batch.idempotency_key == key:
            asked = (body.input_file_id, body.endpoint, body.completion_window, body.metadata)
            if asked != (batch.input_file_id, batch.endpoint, batch.completion_window, batch.metadata):
                raise ApiError(
                    409,
                    f"the Idempotency-Key is that of another request, which made '{batch.id}'",
                    code="idempotency_key_in_use",
                )
            return batch
    return None


async def list_batches(service: Service, request: Request) -> Response:
    batches, owner = _kept(service, request)
    query = _query(request, most=MOST_BATCHES, default=BATCHES)
    found = [batch for batch in batches.store.batches.values() if batch.owner == owner]
    return _listed(found, query)


async def batch_facts(service: Service, request: Request) -> Response:
    return Json(_batch(service, request)[1].public())


async def cancel_batch(service: Service, request: Request) -> Response:
    batches, batch = _batch(service, request)
    return Json(await batches.cancel(batch))


def batch_endpoints(service: Service) -> list[str]:
    """Return the paths that a batch may name: those that the served model answers."""
    return [path for path in service.endpoints if path in BATCH_PATHS]


BATCH_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
)


@dataclass
class FileContent(Response):
    """A file as it is; a client that does not read is dropped."""

    path: Path
    file: StoredFile
    unread_seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(self.file.bytes).encode()),
            (b"content-disposition", f'attachment; filename="{self.file.id}.jsonl"'.encode()),
        ]
        opened = await asyncio.to_thread(self.path.open, "rb")
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            more = True
            while more:
                chunk = await asyncio.to_thread(opened.read, CHUNK_BYTES)
                more = bool(chunk)
                async with asyncio.timeout(self.unread_seconds):
                    await send({"type": "http.response.body", "body": chunk, "more_body": more})
        except TimeoutError:
            raise Gone(f"slow reader: it left the file unread for {self.unread_seconds:g} s") from None
        finally:
            opened.close()


def _kept(service: Service, request: Request) -> tuple[Batches, str]:
    """Return the server's batches and the client's name there; raise `ApiError` (403) where none are kept."""
    if service.batches is None:
        raise ApiError(
            403, "files and batches are kept with --batches FOLDER alone", code="batches_not_allowed"
        )
    return service.batches, service.batches.store.owner(request.scope.get("key"))


def _nested(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a form's fields with those of `expires_after`, which come as expires_after[anchor], as an object."""
    outer, inner = dict[str, Any](), dict[str, Any]()
    for name, value in fields.items():
        part = EXPIRES_AFTER.fullmatch(name)
        if part is None:
            outer[name] = value
        else:
            inner[part[1]] = value
    return outer | ({"expires_after": inner} if inner else {})


def _file(service: Service, request: Request) -> tuple[Batches, StoredFile]:
    batches, owner = _kept(service, request)
    return batches, batches.store.file(request.path_params["file_id"], owner)


def _batch(service: Service, request: Request) -> tuple[Batches, StoredBatch]:
    batches, owner = _kept(service, request)
    return batches, batches.store.batch(request.path_params["batch_id"], owner)


def _query(request: Request, *more: str, most: int, default: int) -> dict[str, Any]:
    """Return the parameters of a list; raise `ApiError` for one that is unknown or wrong."""
    query = dict(request.query_params)
    if unknown := query.keys() - {"limit", "after", *more}:
        name = min(unknown)
        raise invalid(f"'{name}' is not supported", name, "unknown_parameter")
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= most):
        raise invalid(f"'limit' is a number from 1 to {most}", "limit", "invalid_value")
    if query.get("order") not in (None, "asc", "desc"):
        raise invalid("'order' is asc or desc", "order", "invalid_value")
    return query | {"limit": int(limit)}


def _listed(found: Sequence[StoredFile | StoredBatch], query: dict[str, Any]) -> Response:
    """Answer with a page of records, which are given in the order of their making; the newest come first."""
    if query.get("order") != "asc":
        found = found[::-1]
    if (after := query.get("after")) is not None:
        place = next((place for place, record in enumerate(found) if record.id == after), None)
        if place is None:
            raise invalid(f"'after': there is no '{after}' in the list", "after", "invalid_value")
        found = found[place + 1 :]
    page = found[: query["limit"]]
    return Json(
        {
            "object": "list",
            "data": [record.public() for record in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(found) > len(page),
        }
    )
