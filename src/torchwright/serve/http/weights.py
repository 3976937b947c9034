"""Weights that change while the server runs, below one folder alone, and pauses of generation; SGLang's paths.

`--allow-weights FOLDER` lets clients do both; without it every path here but /abort_request of one id is a 403.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from torchwright.serve.api_error import ApiError
from torchwright.serve.http.native import control, read_control
from torchwright.serve.http.service import Service
from torchwright.serve.http.stream import Json
from torchwright.serve.ids import new_id
from torchwright.serve.openai.parse import Body
from torchwright.serve.openai.weights_request import (
    AbortRequest,
    ContinueRequest,
    NameWeightsRequest,
    PauseRequest,
    UpdateWeightsRequest,
)
from torchwright.serve.wire.messages import (
    Controlled,
    NameWeights,
    Pause,
    Resume,
    UpdateWeights,
    WeightsUpdated,
)

Asked = TypeVar("Asked", bound=Body)
FILES = 4096
"""Entries of a folder of weights at most."""


async def update_weights_from_disk(service: Service, request: Request) -> Response:
    """Answered when the next step has the new weights; until then the old ones are served."""
    body, allowed = await _read(service, request, UpdateWeightsRequest)
    path = weights_below(allowed, body.model_path)
    message = UpdateWeights(
        id=new_id("weights-"),
        folder=str(path),
        version=body.weight_version,
        abort=body.abort_all_requests,
        pause=body.keep_pause,
    )
    try:
        updated = await control(service, message, WeightsUpdated)
    except ApiError as error:  # names the path as the client did
        text = error.message.replace(str(path), body.model_path)
        raise ApiError(
            error.status, text, param="model_path", code=error.code, headers=error.headers
        ) from None
    client = service.client
    client.weights = msgspec.structs.replace(message, version=updated.version)
    client.paused = client.paused or body.keep_pause
    return Json(
        {
            "success": True,
            "message": f"the weights of {body.model_path} are served as version {updated.version}",
            "num_paused_requests": updated.requests,
            "weight_version": updated.version,
        }
    )


async def update_weight_version(service: Service, request: Request) -> Response:
    body, _ = await _read(service, request, NameWeightsRequest)
    message = NameWeights(id=new_id("name-"), version=body.new_version, abort=body.abort_all_requests)
    updated = await control(service, message, WeightsUpdated)
    client = service.client
    if client.weights is not None:
        client.weights = msgspec.structs.replace(client.weights, version=updated.version)
    text = f"the weights are served as version {updated.version}"
    return Json({"success": True, "message": text, "new_version": updated.version})


async def weight_version(service: Service, request: Request) -> Response:
    return Json({"weight_version": service.client.weight_version})


async def pause_generation(service: Service, request: Request) -> Response:
    """Requests that come later wait until /continue_generation."""
    body, _ = await _read(service, request, PauseRequest)
    done = await control(service, Pause(id=new_id("pause-"), mode=body.mode), Controlled)
    service.client.paused = True
    return Json({"status": "ok", "message": "generation is paused", "num_paused_requests": done.requests})


async def continue_generation(service: Service, request: Request) -> Response:
    await _read(service, request, ContinueRequest)
    done = await control(service, Resume(id=new_id("resume-")), Controlled)
    service.client.paused = False
    return Json({"status": "ok", "message": "generation goes on", "num_paused_requests": done.requests})


async def abort_request(service: Service, request: Request) -> Response:
    """The requests end with what they have and the finish reason `abort`."""
    body = await read_control(service, request, AbortRequest)
    if body.abort_all:
        _allowed(service)
    ended = service.client.abort(None if body.abort_all else body.rid, "aborted by a client")
    return Json({"status": "ok", "num_aborted_requests": ended})


def weights_below(allowed: Path, asked: str) -> Path:
    """Return a folder of weights or a safetensors file, links resolved, relative to `allowed`.

    Raises `ApiError` (404) unless it and all files of the folder lie below `allowed`. The error is the same for a path
    outside that exists and for one that does not, and names neither.
    """
    missing = ApiError(
        404,
        f"there are no weights at '{asked}' below the folder of --allow-weights",
        param="model_path",
        code="weights_not_found",
    )
    try:
        root = allowed.resolve(strict=True)
        path = (root / asked).resolve(strict=True)
        if not path.is_relative_to(root):
            raise missing
        if path.is_file() and path.suffix == ".safetensors":
            return path
        files = [entry.resolve(strict=True) for entry in islice(path.iterdir(), FILES + 1)]
    except (OSError, RuntimeError, ValueError):  # missing, links in a circle, a null byte
        raise missing from None
    below = len(files) <= FILES and all(file.is_relative_to(root) for file in files)
    if not below or not (path / "config.json").is_file():
        raise missing
    return path


async def _read(service: Service, request: Request, kind: type[Asked]) -> tuple[Asked, Path]:
    """A request, and the folder below which weights may be read; raises `ApiError` (403) without one."""
    allowed = _allowed(service)
    return await read_control(service, request, kind), allowed


def _allowed(service: Service) -> Path:
    if service.allow_weights is None:
        raise ApiError(
            403,
            "clients change weights and pause generation with --allow-weights FOLDER alone",
            code="weights_not_allowed",
        )
    return service.allow_weights
