"""Many short requests against `torchwright serve`, and the memory of its processes while they come.

    python benchmarks/serving_load.py [MODEL] [--requests 10000] [--at-once 32] [--json FILE]

The bundled model without MODEL. Requests are of every kind by turns: completions and chats, whole and streamed, with a
grammar, stop strings, log-probabilities, a client that leaves, and one that is refused. Memory is what each process has
resident (VmRSS) when the first tenth has been answered, then at every further tenth; growth is counted from the first
third on, when pools and caches are full.
"""

from __future__ import annotations

import argparse
import asyncio
import builtins
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

import turns

WORDS = tuple(sorted(name for name in vars(builtins) if name.islower()))
KINDS = ("completion", "chat", "stream", "choice", "logprobs", "stop", "leaves", "refused")


def main() -> None:
    parser = argparse.ArgumentParser(description="Many short requests, and the server's memory.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    turns.print_machine()
    with server(*([options.model] if options.model else [])) as (url, pid):
        rows = asyncio.run(load(url, pid, options.requests, options.at_once, say=_print))
    turns.write_json(options.json, rows)


@contextmanager
def server(*arguments: str) -> Iterator[tuple[str, int]]:
    """(URL, process id) of `torchwright serve`, once it is ready; ended with the block."""
    program = "import sys; from torchwright.cli import main; sys.exit(main())"
    words = [sys.executable, "-u", "-c", program, "serve", "--port", "0", *arguments]
    with tempfile.TemporaryFile("w+") as log:  # every request that is refused has its line
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            said = ""
            for line in process.stdout:
                said += line
                if match := re.search(r" at (http://\S+) after ", line):
                    yield match[1], process.pid
                    return
            log.seek(0)
            raise RuntimeError(f"the server ended: {said}{log.read()[-1000:]}")
        finally:
            process.terminate()
            process.wait(60)
            process.stdout.close()


async def load(
    url: str, pid: int, requests: int, at_once: int, say: Callable[[dict[str, Any]], None] = lambda row: None
) -> list[dict[str, Any]]:
    """Rows of (requests answered, seconds, resident MB by process), the last with the answers by status.

    `say` is given each row when it is there.
    """
    draw, answers, rows = random.Random(0), Counter[str](), list[dict[str, Any]]()
    places, begun = iter(range(requests)), time.perf_counter()
    processes = {"http": pid, **children(pid)}

    def look() -> None:
        resident = {name: resident_mb(process) for name, process in processes.items()}
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
    growth = {name: last[name] - middle[name] for name in processes}
    used = re.search(r"^torchwright:kv_cache_usage_perc\S* (\S+)$", metrics, re.MULTILINE)
    assert used is not None, "the metrics have the cache's use"
    rows.append({"answers": dict(answers), "growth_mb": growth, "kv_in_use": float(used[1])})
    say(rows[-1])
    return rows


def _print(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


async def _ask(client: httpx.AsyncClient, kind: str, draw: random.Random) -> str:
    """One request; `KIND STATUS`."""
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
        names = draw.sample(WORDS, 2)
        body["structured_outputs"] = {"choice": names}
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


def children(pid: int) -> dict[str, int]:
    """The server's other processes by what they do."""
    names = {
        "torchwright.serve.engine.process": "engine",
        "torchwright.serve.grammar.worker": "grammars",
        "torchwright.serve.http.read_worker": "reader",
    }
    found: dict[str, int] = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        found |= {name: int(child) for module, name in names.items() if module in words}
    return found


def resident_mb(pid: int) -> float:
    """Resident memory in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    assert match is not None, "the process lives"
    return int(match[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
