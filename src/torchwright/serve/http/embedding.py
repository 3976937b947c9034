"""Texts on their way through a served encoder, for one client."""

from __future__ import annotations

import asyncio
import base64
import struct

from starlette.requests import Request

from torchwright.serve.http.service import Service
from torchwright.serve.http.stream import watch
from torchwright.serve.ids import new_id
from torchwright.serve.openai.generation import expect
from torchwright.serve.wire.mailbox import Dropped
from torchwright.serve.wire.messages import Embed, Embedded


def vector_of(vector: list[float], form: str) -> list[float] | str:
    """Return numbers as they are, or in `base64`."""
    if form == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


async def embed(
    service: Service,
    request: Request,
    texts: list[str],
    pairs: list[str] | None = None,
    *,
    special: bool = True,
    param: str = "input",
) -> tuple[list[list[float]], int]:
    """The embeddings of texts, or a classifier's logits, and the texts' tokens.

    `pairs` and `special` are those of `Embed`; `param` is the field of the texts.

    Raises `ApiError` when the engine refuses the texts, fails or dies, and `Gone` when the client leaves; what is left
    of the texts is then not embedded.
    """
    client, id = service.client, new_id("embd-")
    mailbox, vectors, tokens = client.mailbox(), dict[int, list[float]](), 0
    watcher = asyncio.create_task(watch(request, lambda reason: mailbox.put(Dropped(reason))))
    client.submit(Embed(id=id, texts=texts, pairs=pairs, special=special), mailbox)
    try:
        while len(vectors) < len(texts):
            for item in await mailbox.take():
                found = expect(item, Embedded, param)
                vectors.update(zip(found.places, found.vectors, strict=True))
                tokens += found.tokens
    finally:
        watcher.cancel()
        if len(vectors) < len(texts):
            client.cancel(id, "abandoned")
        client.finish(id)
    return [vectors[place] for place in range(len(texts))], tokens
