"""Server information in the format of vLLM and SGLang, by which gateways recognize their back end.

vLLM's are /v1/models, /version and /load; SGLang's are /server_info, /model_info, /v1/loads and /health_generate, with
their older names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from torchwright.models.speech.transcript import Options
from torchwright.serve.api_error import unavailable
from torchwright.serve.http.service import Service
from torchwright.serve.http.stream import Json
from torchwright.serve.ids import new_id
from torchwright.serve.wire.messages import (
    Embed,
    Embedded,
    Heard,
    Paint,
    Painted,
    SamplingOptions,
    Submit,
    TokenOutput,
    Transcribe,
)

PROBE_BYTES = 4 * 16_000
"""A second of silence."""
Probe = Submit | Embed | Transcribe | Paint


async def models(service: Service, request: Request) -> Response:
    return Json({"object": "list", "data": [_card(service, name) for name in service.names]})


async def model_facts(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    service.check_model(name)
    return Json(_card(service, name))


async def version_text(service: Service, request: Request) -> Response:
    return Json({"version": version("torchwright")})


async def server_info(service: Service, request: Request) -> Response:
    ready = service.engine()
    return Json(
        {
            "model_path": str(service.folder),
            "tokenizer_path": str(service.folder),
            "served_model_name": service.name,
            "version": version("torchwright"),
            "is_embedding": ready.kind in ("encoder", "classifier"),
            "context_length": ready.context,
            "max_total_tokens": ready.pages * ready.page_tokens,
            "max_running_requests": ready.max_running,
            "weight_version": service.client.weight_version,
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "disaggregation_mode": "null",
        }
    )


async def model_info(service: Service, request: Request) -> Response:
    service.engine()
    return Json(
        {
            "model_path": str(service.folder),
            "tokenizer_path": str(service.folder),
            "is_generation": service.model is not None,
            "preferred_sampling_params": None,
            "weight_version": service.client.weight_version,
            "model_type": service.config.get("model_type"),
            "architectures": service.config.get("architectures"),
            "has_image_understanding": "image" in service.input_modalities,
            "has_audio_understanding": service.sounds is not None,
        }
    )


async def loads(service: Service, request: Request) -> Response:
    now = datetime.now(UTC).isoformat()
    loads = [_load(service)]
    return Json({"timestamp": now, "version": version("torchwright"), "dp_rank_count": 1, "loads": loads})


async def get_load(service: Service, request: Request) -> Response:
    load = _load(service)
    old = {
        "dp_rank": load["dp_rank"],
        "num_reqs": load["num_total_reqs"],
        "num_waiting_reqs": load["num_waiting_reqs"],
        "num_tokens": load["num_used_tokens"],
    }
    return Json([old])


def _load(service: Service) -> dict[str, Any]:
    """The scheduler's state after its last step, of the one replica that there is."""
    ready, stats = service.engine(), service.client.stats
    room = ready.pages * ready.page_tokens
    used = stats.pages_used * ready.page_tokens if stats else 0
    running, waiting = (stats.running, stats.waiting) if stats else (0, 0)
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": room,
        "token_usage": used / room if room else 0.0,
        "cache_hit_rate": stats.prefix_hits / stats.prefix_queries if stats and stats.prefix_queries else 0.0,
        "max_running_requests": ready.max_running,
    }


async def load(service: Service, request: Request) -> Response:
    return Json({"server_load": service.client.waiting})


async def health_generate(service: Service, request: Request) -> Response:
    """200 once the engine has computed something for this request; 503 where it has not within `probe_seconds`."""
    async with _probe(service) as probe:
        return await _probed(service, probe)


@contextlib.asynccontextmanager
async def _probe(service: Service) -> AsyncIterator[Probe]:
    """The least that the served model can be asked for."""
    id = new_id("probe-")
    if service.sounds is not None:
        async with service.sounds.place() as place:
            place.samples.write_bytes(bytes(PROBE_BYTES))
            yield Transcribe(id=id, samples=str(place.samples), options=Options())
    elif service.engine().kind == "painter":
        yield Paint(id=id, prompt="a", seed=0, steps=1, size=None)
    elif service.model is None:
        yield Embed(id=id, texts=["a"])
    else:
        yield Submit(id=id, ids=[0], max_tokens=1, sampling=SamplingOptions(temperature=0.0))


async def _probed(service: Service, probe: Probe) -> Response:
    id, client, seconds = probe.id, service.client, service.limits.probe_seconds
    mailbox = client.mailbox()
    client.submit(probe, mailbox)
    try:
        async with asyncio.timeout(seconds):
            (first, *_) = await mailbox.take()
    except TimeoutError:
        raise unavailable(f"the engine has computed nothing within {seconds:g} s") from None
    finally:
        client.cancel(id, "probed")
        client.finish(id)
    if not isinstance(first, TokenOutput | Embedded | Heard | Painted) or (
        isinstance(first, TokenOutput) and first.finish == "error"
    ):
        raise unavailable("the engine did not compute the probe")
    return Json({"status": client.state})


def _card(service: Service, name: str) -> dict[str, Any]:
    """Describe the served model under one of its names, as vLLM's /v1/models does."""
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": service.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "torchwright",
        "root": str(service.adapters.get(name, service.folder)),
        "parent": service.name if name in service.adapters else None,
        "max_model_len": service.engine().context,
        "permission": [permission],
        # Ours: without one, conversations are written by a plain template that the model was not trained on.
        "chat_template": service.chat_template,
        # Ours: what the chat page, and any other client, may send.
        "endpoints": service.endpoints,
        "input_modalities": service.input_modalities,
    }
