"""Adapters that clients load and unload, below one folder alone; the paths and fields are vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from torchwright.hub.adapter_files import CONFIG, WEIGHTS
from torchwright.serve.api_error import ApiError, invalid
from torchwright.serve.http.guard import held_body
from torchwright.serve.http.service import Service
from torchwright.serve.ids import new_id
from torchwright.serve.openai.adapter_request import LoadAdapterRequest, UnloadAdapterRequest
from torchwright.serve.openai.generation import expect
from torchwright.serve.openai.parse import Body, parse
from torchwright.serve.wire.mailbox import Item
from torchwright.serve.wire.messages import (
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    RequestRefused,
    UnloadAdapter,
)

Asked = TypeVar("Asked", bound=Body)
LONGEST = 16 * 1024
"""Bytes of a request: a name and a path."""


async def load_lora_adapter(service: Service, request: Request) -> Response:
    body, allowed = await _read(service, request, LoadAdapterRequest)
    name = body.lora_name
    if name in (service.name, *service.aliases):
        raise invalid(f"'{name}' is the served model itself", "lora_name")
    if name in service.adapters and not body.load_inplace:
        raise invalid(
            f"there is an adapter '{name}' already; load_inplace replaces it", "lora_name", "adapter_exists"
        )
    folder = folder_below(allowed, body.lora_path)
    message = LoadAdapter(id=new_id("load-"), name=name, folder=str(folder), replace=body.load_inplace)
    expect(_as_asked(await _answer(service, message), str(folder), body.lora_path), AdapterLoaded)
    service.adapters[name] = folder
    service.client.adapters[name] = message
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(service: Service, request: Request) -> Response:
    """Answered when the adapter's running requests have ended; new ones are refused from the start."""
    body, _ = await _read(service, request, UnloadAdapterRequest)
    name = body.lora_name
    if service.adapters.pop(name, None) is None:
        raise ApiError(404, f"there is no adapter '{name}'", param="lora_name", code="adapter_not_found")
    service.client.adapters.pop(name, None)
    expect(await _answer(service, UnloadAdapter(id=new_id("unload-"), name=name)), AdapterUnloaded)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def folder_below(allowed: Path, asked: str) -> Path:
    """Return an adapter's folder, links resolved, relative to `allowed`.

    Raises `ApiError` (404) unless the folder and its files lie below `allowed`. The error is the same for a path
    outside that exists and for one that does not, and names neither.
    """
    missing = ApiError(
        404,
        f"there is no adapter at '{asked}' below the folder of --allow-adapters",
        param="lora_path",
        code="adapter_not_found",
    )
    try:
        root = allowed.resolve(strict=True)
        folder = (root / asked).resolve(strict=True)
        files = [(folder / name).resolve(strict=True) for name in (CONFIG, WEIGHTS)]
    except (OSError, RuntimeError, ValueError):  # missing, links in a circle, a null byte
        raise missing from None
    if not all(path.is_relative_to(root) for path in (folder, *files)):
        raise missing
    return folder


async def _read(service: Service, request: Request, kind: type[Asked]) -> tuple[Asked, Path]:
    """A request, and the folder below which adapters may be loaded; raises `ApiError` (403) where none is."""
    if service.allow_adapters is None:
        raise ApiError(
            403,
            "adapters are loaded at run time below --allow-adapters FOLDER alone",
            code="adapters_not_allowed",
        )
    service.decoder(None)
    async with held_body(request, service.limits) as raw:
        if len(raw) > LONGEST:
            raise invalid(f"the request has {len(raw)} bytes; at most {LONGEST} are read")
        return parse(kind, raw), service.allow_adapters


async def _answer(service: Service, message: LoadAdapter | UnloadAdapter) -> Item:
    """The engine's answer, waited for even if the client leaves: the engine does what was asked in any case."""
    mailbox = service.client.mailbox()
    service.client.submit(message, mailbox)
    try:
        (item, *_) = await mailbox.take()
        return item
    finally:
        service.client.finish(message.id)


def _as_asked(item: Item, folder: str, asked: str) -> Item:
    """A refusal that names the folder as the client did."""
    if isinstance(item, RequestRefused):
        return msgspec.structs.replace(item, text=item.text.replace(folder, asked))
    return item
