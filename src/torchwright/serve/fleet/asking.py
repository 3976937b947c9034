"""Short questions to the fleet's own servers, from a thread so that none holds up the others."""

from __future__ import annotations

import asyncio
import http.client
import json
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 64 * 1024 * 1024
"""An answer longer than that is cut: the figures of a thousand replicas take a tenth."""


@dataclass(frozen=True)
class Answer:
    """A status and a body; status 0 where nobody answered."""

    status: int
    body: bytes = b""

    def json(self) -> Any:
        """Return the body's JSON, None where it has none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


async def ask(
    place: str,
    path: str,
    *,
    key: str | None = None,
    method: str = "GET",
    body: object = None,
    seconds: float = 2.0,
) -> Answer:
    """Send a request to HOST:PORT; whatever goes wrong is the status 0."""
    return await asyncio.to_thread(_ask, place, path, key, method, body, seconds)


def _ask(place: str, path: str, key: str | None, method: str, body: object, seconds: float) -> Answer:
    connection = http.client.HTTPConnection(place, timeout=seconds)
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return Answer(response.status, response.read(MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return Answer(0)
    finally:
        connection.close()
