"""A batch behind interactive requests: how fast its rows are, and what a client next to it notices.

    python -m benchmarks.serve.batches [MODEL] [--rows 300] [--tokens 32] [--asked 30] [--json FILE]

The bundled model without MODEL. Rows have prompts of 24 random words and fixed answers. In one server, in this order:

- `requests`: the rows as completions of 32 clients, as many as a batch has places; rows/s
- `batch`: the same rows as a batch; rows/s
- `alone`: one client streams an answer of 16 tokens after the other; seconds to the first token and to the last
- `next to a batch`: such answers while a batch runs, which is cancelled at the end; and the rows/s of the batch
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from benchmarks.harness import run
from benchmarks.harness.run import Row
from benchmarks.serve.server import WORDS, server

CLIENTS = 32
PROMPT_WORDS = 24
ANSWER_TOKENS = 16
POLL_SECONDS = 0.05
ENDED = ("completed", "failed", "cancelled", "expired")


def main() -> None:
    options = run.options(__doc__, "model?", rows=300, tokens=32, asked=30)
    columns = ("load", "rows/s", "first token, ms: median, 95%", "whole answer, ms: median, 95%")
    rows = run.Rows(options.json, columns)
    with (
        tempfile.TemporaryDirectory() as folder,
        server(options.model, "--batches", folder) as (url, _),
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        bodies = list(_bodies(options.rows, options.tokens))
        _send(url, bodies[:CLIENTS])  # caches and compiled paths are warm
        rows.add(*_rate("requests", options.rows, _send(url, bodies)))
        begun = time.perf_counter()
        _wait(client, _begin(client, list(_bodies(options.rows, options.tokens))))
        rows.add(*_rate("batch", options.rows, time.perf_counter() - begun))
        rows.add(*_latency("alone", _streams(client, options.asked), None))
        with _running(client, options.tokens) as done:
            before, begun = done(), time.perf_counter()
            times = _streams(client, options.asked)
            rate = (done() - before) / (time.perf_counter() - begun)
        rows.add(*_latency("next to a batch", times, rate))


def _bodies(rows: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield requests that no other call yields, so that the prefix cache does not help."""
    for _ in range(rows):
        prompt = " ".join(random.choices(WORDS, k=PROMPT_WORDS))
        yield {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}


def _send(url: str, bodies: list[dict[str, Any]]) -> float:
    """Send all requests, `CLIENTS` at a time; return the seconds."""

    async def all_of_them() -> None:
        left = iter(bodies)

        async def one_client(client: httpx.AsyncClient) -> None:
            for body in left:
                (await client.post("/v1/completions", json=body)).raise_for_status()

        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            await asyncio.gather(*(one_client(client) for _ in range(CLIENTS)))

    begun = time.perf_counter()
    asyncio.run(all_of_them())
    return time.perf_counter() - begun


def _begin(client: httpx.Client, bodies: list[dict[str, Any]]) -> str:
    """Begin a batch; return its id."""
    lines = [
        json.dumps({"custom_id": f"{place}", "method": "POST", "url": "/v1/completions", "body": body})
        for place, body in enumerate(bodies)
    ]
    data = "\n".join(lines).encode()
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return client.post("/v1/batches", json=asked).json()["id"]


def _wait(client: httpx.Client, id: str) -> None:
    while (status := client.get(f"/v1/batches/{id}").json()["status"]) not in ENDED:
        time.sleep(POLL_SECONDS)
    assert status in ("completed", "cancelled"), status


@contextmanager
def _running(client: httpx.Client, tokens: int) -> Iterator[Any]:
    """Run a batch that does not end during the block; yield what tells how many rows are done."""
    id = _begin(client, list(_bodies(20_000, tokens)))

    def done() -> int:
        return client.get(f"/v1/batches/{id}").json()["request_counts"]["completed"]

    while not done():
        time.sleep(POLL_SECONDS)
    yield done
    client.post(f"/v1/batches/{id}/cancel").raise_for_status()
    _wait(client, id)


def _streams(client: httpx.Client, count: int) -> list[tuple[float, float]]:
    """Return the seconds to the first token and to the last of each answer."""
    found = []
    for body in _bodies(count, ANSWER_TOKENS):
        begun, first = time.perf_counter(), None
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            for line in answer.iter_lines():
                if first is None and line.startswith("data: {"):
                    first = time.perf_counter() - begun
        found.append((first or 0.0, time.perf_counter() - begun))
    return found


def _rate(load: str, rows: int, seconds: float) -> tuple[Row, tuple[str, ...]]:
    return {"load": load, "rows_per_s": rows / seconds}, (load, f"{rows / seconds:.1f}", "", "")


def _latency(load: str, times: list[tuple[float, float]], rate: float | None) -> tuple[Row, tuple[str, ...]]:
    cells = []
    for column in zip(*times, strict=True):
        spread = statistics.quantiles(column, n=20)
        cells.append(f"{1000 * statistics.median(column):.0f}, {1000 * spread[-1]:.0f}")
    row = {"load": load, "rows_per_s": rate, "times": times}
    return row, (load, "" if rate is None else f"{rate:.1f}", *cells)


if __name__ == "__main__":
    main()
