"""`torchwright serve --replicas`: prompt tokens from the cache by routing policy, and a rolling restart under load.

    python -m benchmarks.serve.fleet [MODEL] [--replicas 2] [--part cache|restart …] [--json FILE]

The bundled model without MODEL; `pip install 'torchwright[fleet]'`.

- `cache`: `GROUPS` beginnings of `SHARED` words, each with `TURNS` ends of `OWN` words, in random order from `AT_ONCE`
  clients. Share of the prompts' tokens that came from a prefix cache: with one server, which is what is possible, and
  with several by each policy. Each row has a fleet of its own, with empty caches.
- `restart`: `AT_ONCE` clients stream `STREAM_TOKENS` tokens again and again. Meanwhile each replica in turn gets a
  SIGTERM and is waited for until it takes requests. Streams by how they ended: whole, with an error, cut.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.harness import run
from benchmarks.harness.run import Row
from benchmarks.serve.server import WORDS, server

GROUPS, TURNS = 24, 6
SHARED, OWN = 120, 12
"""Words; a beginning of 120 has some 300 tokens."""
NEW_TOKENS = 8
AT_ONCE = 4
STREAM_TOKENS = 200
POLICIES = ("round_robin", "cache_aware")
PARTS = ("cache", "restart")
WAIT_SECONDS = 180.0
REPLICA = "torchwright.serve.fleet.replica_process"


@dataclass(frozen=True)
class Serving:
    """A fleet that takes requests."""

    url: str
    pid: int
    metrics_url: str
    replicas: int

    def figure(self, name: str) -> float:
        """Return the sum of a figure over all servers."""
        text = httpx.get(self.metrics_url, timeout=30).text
        return sum(float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE))

    def wait(self) -> None:
        """Wait until every replica takes requests and the gateway knows it."""
        end = time.monotonic() + WAIT_SECONDS
        while self.figure("torchwright:engine_ready") + self.figure("smg_worker_health") != 2 * self.replicas:
            if time.monotonic() > end:
                raise RuntimeError("a replica does not come back")
            time.sleep(0.2)


def main() -> None:
    options = run.options(__doc__, "model?", replicas=2, part=PARTS)
    rows = run.Rows(options.json, ("part", "replicas", "policy", "result"))
    if "cache" in options.part:
        for replicas, policy in ((1, POLICIES[0]), *((options.replicas, policy) for policy in POLICIES)):
            with fleet(options.model, replicas, policy) as serving:
                row = asyncio.run(cache(serving))
            cells = (
                "cache",
                replicas,
                policy,
                f"{row['from_cache']:.3f} of {row['prompt_tokens']:.0f} prompt tokens from cache",
            )
            rows.add({"part": "cache", "replicas": replicas, "policy": policy, **row}, cells)
    if "restart" in options.part:
        with fleet(options.model, options.replicas, "cache_aware") as serving:
            row = asyncio.run(restart(serving))
        cells = ("restart", options.replicas, "cache_aware", json.dumps(row))
        rows.add({"part": "restart", "replicas": options.replicas, **row}, cells)


@contextmanager
def fleet(model: str | None, replicas: int, policy: str) -> Iterator[Serving]:
    """Serve a model by several replicas until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = f"--replicas {replicas} --policy {policy} --metrics-port {port} --kv-memory 256MiB".split()
    with server(model, *words) as (url, pid):
        serving = Serving(url, pid, f"http://127.0.0.1:{port}/metrics", replicas)
        serving.wait()
        yield serving


async def cache(serving: Serving, seed: int = 0) -> Row:
    """Return the share of prompt tokens that came from a cache."""
    draw = random.Random(seed)
    prompts = [
        " ".join([*beginning, *draw.choices(WORDS, k=OWN)])
        for beginning in (draw.choices(WORDS, k=SHARED) for _ in range(GROUPS))
        for _ in range(TURNS)
    ]
    draw.shuffle(prompts)
    async with httpx.AsyncClient(base_url=serving.url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        waiting = iter(prompts)

        async def worker() -> None:
            for prompt in waiting:
                body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True}
                (await client.post("/v1/completions", json=body)).raise_for_status()

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    asked = serving.figure("torchwright:prefix_cache_queries_total")
    return {
        "from_cache": serving.figure("torchwright:prefix_cache_hits_total") / asked,
        "prompt_tokens": asked,
    }


async def restart(serving: Serving) -> Row:
    """Return the streams by how they ended while every replica was replaced, and the seconds that this took."""
    ends, over = Counter[str](), asyncio.Event()
    async with httpx.AsyncClient(base_url=serving.url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": model, "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}

        async def worker(number: int) -> None:
            while not over.is_set():
                prompt = f"{number} {ends.total()} {WORDS[number]}"
                ends[await _stream(client, {**body, "prompt": prompt})] += 1

        streaming = [asyncio.create_task(worker(number)) for number in range(AT_ONCE)]
        begun = time.monotonic()
        for pid in _replicas(serving.pid):
            os.kill(pid, signal.SIGTERM)
            await asyncio.to_thread(_until, lambda pid=pid: pid not in _replicas(serving.pid))
            await asyncio.to_thread(serving.wait)
        seconds = time.monotonic() - begun
        over.set()
        await asyncio.gather(*streaming)
    return {"streams": dict(ends), "restarts": serving.replicas, "s": round(seconds, 1)}


async def _stream(client: httpx.AsyncClient, body: Row) -> str:
    """Return how a stream ended."""
    last, seen = "", 0
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}"
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    seen += '"error"' not in line
                    last = line
    except httpx.TransportError:
        return "cut"
    return "whole" if last == "data: [DONE]" and seen > 1 else "with an error"


def _replicas(pid: int) -> list[int]:
    """Return the replicas' processes."""
    return [child for child in run.children(pid) if REPLICA in Path(f"/proc/{child}/cmdline").read_text()]


def _until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not reached():
        if time.monotonic() > end:
            raise RuntimeError("a replica does not end")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
