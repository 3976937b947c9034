"""Prompts on their way to pictures, for one client; like OpenAI's of the same path."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from torchwright.models.diffusion.limits import Style
from torchwright.serve.http.guard import held_body, record_of
from torchwright.serve.http.service import Service
from torchwright.serve.http.stream import Json, watch
from torchwright.serve.ids import new_id
from torchwright.serve.openai.generation import expect
from torchwright.serve.openai.image_request import ImageRequest
from torchwright.serve.wire.mailbox import Dropped
from torchwright.serve.wire.messages import Paint, Painted

SEEDS = 2**32
"""A seed that is drawn is below it: a number that JavaScript's clients keep whole."""


async def images(service: Service, request: Request) -> Response:
    async with held_body(request, service.limits) as raw:
        body = await service.reader.request(ImageRequest, raw)
    service.check_painter(body.model)
    record_of(request).user = body.user
    seed = secrets.randbelow(SEEDS) if body.seed is None else body.seed
    seeds = range(seed, seed + body.n)
    pictures = await paint(service, request, body, seeds)
    files = await asyncio.to_thread(lambda: [_file(picture, body) for picture in pictures])
    height, width = pictures[0].size
    return Json(
        {
            "created": int(time.time()),
            "data": [{"b64_json": file, "seed": seed} for file, seed in zip(files, seeds, strict=True)],
            "output_format": body.output_format,
            "size": f"{width}x{height}",
            **({"notices": notices} if (notices := pictures[0].notices) else {}),
        }
    )


async def paint(service: Service, request: Request, body: ImageRequest, seeds: range) -> list[Painted]:
    """A picture for each seed.

    Raises `ApiError` when the engine refuses one, fails or dies, and `Gone` when the client leaves; what is left is
    then not painted.
    """
    client = service.client
    mailbox, pictures = client.mailbox(), dict[str, Painted]()
    ids = [new_id("img-") for _ in seeds]
    watcher = asyncio.create_task(watch(request, lambda reason: mailbox.put(Dropped(reason))))
    for id, seed in zip(ids, seeds, strict=True):
        asked = Paint(
            id=id,
            prompt=body.prompt,
            seed=seed,
            steps=body.steps,
            size=body.height_width,
            style=Style(guidance=body.guidance, negative=body.negative_prompt, scheduler=body.scheduler),
        )
        client.submit(asked, mailbox)
    try:
        while len(pictures) < len(ids):
            for item in await mailbox.take():
                painted = expect(item, Painted)
                if painted.pixels is not None:
                    pictures[painted.id] = painted
    finally:
        watcher.cancel()
        for id in ids:
            if id not in pictures:
                client.cancel(id, "abandoned")
            client.finish(id)
    return [pictures[id] for id in ids]


def _file(painted: Painted, body: ImageRequest) -> str:
    """The picture's file in base64."""
    from torchwright.models.diffusion.picture import encoded

    assert painted.pixels is not None
    pixels_HW3 = np.frombuffer(painted.pixels, np.uint8).reshape(*painted.size, 3)
    return base64.b64encode(encoded(pixels_HW3, body.output_format, body.output_compression)).decode()
