"""Many short requests against `torchwright serve`, and the memory of its processes while they come.

    python -m benchmarks.serve.load [MODEL] [--requests 10000] [--at-once 32] [--json FILE]

The bundled model without MODEL. Requests are of every kind by turns: completions and chats, whole and streamed, with a
grammar, stop strings, log-probabilities, a client that leaves, and one that is refused. Memory is the resident memory
(VmRSS) of each process after each tenth of the requests. Growth is counted from the first third on, when pools and
caches are full.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from benchmarks.harness import run
from benchmarks.harness.run import Row
from benchmarks.serve.server import WORDS, processes, resident_mb, server

KINDS = ("completion", "chat", "stream", "choice", "logprobs", "stop", "leaves", "refused")


def main() -> None:
    options = run.options(__doc__, "model?", requests=10_000, at_once=32)
    rows = run.Rows(options.json)
    with server(options.model) as (url, pid):
        say: Callable[[Row], None] = lambda row: rows.add(row, json.dumps(row))
        asyncio.run(load(url, pid, options.requests, options.at_once, say=say))


async def load(
    url: str, pid: int, requests: int, at_once: int, say: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Return rows of (requests answered, seconds, resident MB by process), the last with the answers by status.

    `say` is called with each row as it is added.
    """
    draw, answers, rows = random.Random(0), Counter[str](), list[Row]()
    places, begun = iter(range(requests)), time.perf_counter()
    live = processes(pid)

    def look() -> None:
        resident = {name: resident_mb(process) for name, process in live.items()}
        rows.append({"answered": sum(answers.values()), "s": time.perf_counter() - begun, "mb": resident})
        say(rows[-1])

    async def worker(client: httpx.AsyncClient) -> None:
        for place in places:
            answers[await _ask(client, KINDS[place % len(KINDS)], draw)] += 1
            if sum(answers.values()) % max(1, requests // 10) == 0:
                look()

    look()
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await asyncio.gather(*(worker(client) for _ in range(at_once)))
        metrics = (await client.get("/metrics")).text
    middle, last = rows[len(rows) // 3]["mb"], rows[-1]["mb"]
    growth = {name: last[name] - middle[name] for name in live}
    used = re.search(r"^torchwright:kv_cache_usage_perc\S* (\S+)$", metrics, re.MULTILINE)
    assert used is not None, "the metrics have the cache's use"
    rows.append({"answers": dict(answers), "growth_mb": growth, "kv_in_use": float(used[1])})
    say(rows[-1])
    return rows


async def _ask(client: httpx.AsyncClient, kind: str, draw: random.Random) -> str:
    """Send one request; return its kind and the status of the answer."""
    text = " ".join(draw.choices(WORDS, k=draw.randint(2, 24)))
    body: dict[str, Any] = {"prompt": text, "max_tokens": draw.randint(1, 8), "temperature": 0.8}
    path = "/v1/completions"
    if kind == "chat":
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": text}]
        path = "/v1/chat/completions"
    elif kind in ("stream", "leaves"):
        body["stream"] = True
    elif kind == "choice":
        # A few grammars that come again, and many that do not.
        body["structured_outputs"] = {"choice": draw.sample(WORDS, 2)}
    elif kind == "logprobs":
        body |= {"logprobs": 3, "echo": True}
    elif kind == "stop":
        body |= {"stop": ["e", "\n\n"], "n": 2}
    elif kind == "refused":
        body["temperature"] = -1
    if kind == "leaves":
        async with client.stream("POST", path, json={**body, "max_tokens": 64}) as response:
            await anext(response.aiter_lines())
            return f"{kind} {response.status_code}"
    response = await client.post(path, json=body)
    return f"{kind} {response.status_code}"


if __name__ == "__main__":
    main()
