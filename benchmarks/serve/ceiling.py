"""The HTTP process's ceiling: processor time of each process of `torchwright serve` for one request, by kind.

    python -m benchmarks.serve.ceiling [MODEL] [--requests 3000] [--connections 16] [--fleet] [--json FILE]

The bundled model without MODEL. The HTTP process answers on one thread, so it answers at most one request for each
share of a second that a request costs it: the ceiling is 1 / (its processor seconds per request), whatever else the
machine does. Measured rates are lower where the clients and the engine need the same cores. Kinds:

- `ready`: GET /ready: a connection's request and answer, and nothing else
- `completion`: POST /v1/completions with one new token
- `long prompt`: the same with 500 tokens of prompt
- `chat`: POST /v1/chat/completions with 16 new tokens
- `stream`: the same as a stream; also by event, which is what long answers cost

--fleet puts the gateway in front (`--replicas 1`), whose own processor time is a column of its own then.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.harness import run
from benchmarks.harness.run import Row
from benchmarks.serve.server import WORDS, processes, server

TALK = [{"role": "user", "content": "Sort a list of numbers."}]
KINDS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "ready": ("/ready", None),
    "completion": ("/v1/completions", {"prompt": "def f(", "max_tokens": 1}),
    "long prompt": ("/v1/completions", {"prompt": " ".join(WORDS[:200]), "max_tokens": 1}),
    "chat": ("/v1/chat/completions", {"messages": TALK, "max_tokens": 16, "ignore_eos": True}),
    "stream": (
        "/v1/chat/completions",
        {"messages": TALK, "max_tokens": 16, "ignore_eos": True, "stream": True},
    ),
}
TICKS = os.sysconf("SC_CLK_TCK")
FLEET = {
    "torchwright.serve.fleet.gateway_process": "gateway",
    "torchwright.serve.fleet.replica_process": "replica",
}


def main() -> None:
    options = run.options(__doc__, "model?", requests=3000, connections=16, fleet=False)
    columns = ("kind", "requests/s", "HTTP ms", "engine ms", "gateway ms", "events", "ceiling, requests/s")
    rows = run.Rows(options.json, columns)
    words = ["--replicas", "1", "--metrics-port", "0"] if options.fleet else []
    with server(options.model, *words) as (url, pid):
        if options.fleet:
            time.sleep(3)  # the gateway is ready before it has probed its replica
        for kind in KINDS:
            path = "/readiness" if options.fleet and kind == "ready" else KINDS[kind][0]
            row = asyncio.run(measure(url, pid, kind, path, options.requests, options.connections))
            ms = [
                f"{row['ms'][role]:.3f}" if role in row["ms"] else ""
                for role in ("http", "engine", "gateway")
            ]
            ceiling = f"{row['ceiling']:.0f}" if row["ceiling"] else ""
            rows.add(row, (kind, f"{row['per_s']:.0f}", *ms, f"{row['events']:.1f}", ceiling))


async def measure(url: str, pid: int, kind: str, path: str, requests: int, connections: int) -> Row:
    """Return rate, processor milliseconds per request by process, and events per request."""
    body = KINDS[kind][1]
    model = (await _models(url))["data"][0]["id"]
    message = _message(urlsplit(url).netloc, path, None if body is None else {"model": model, **body})
    live = _processes(pid)
    await _send(url, message, connections, connections)  # connections, caches and compiled paths are warm
    before, begun = {role: _cpu(each) for role, each in live.items()}, time.perf_counter()
    events = await _send(url, message, requests, connections)
    seconds = time.perf_counter() - begun
    ms = {role: 1000 * (_cpu(each) - before[role]) / requests for role, each in live.items()}
    return {
        "kind": kind,
        "per_s": requests / seconds,
        "ms": ms,
        "events": events / requests,
        "ceiling": 1000 / ms["http"] if ms["http"] else None,
    }


async def _models(url: str) -> Any:
    async with httpx.AsyncClient() as client:
        return (await client.get(url + "/v1/models")).json()


def _message(host: str, path: str, body: dict[str, Any] | None) -> bytes:
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


async def _send(url: str, message: bytes, requests: int, connections: int) -> int:
    """Send a request so many times over kept connections; return the events of all answers."""
    place = urlsplit(url)
    left, events = iter(range(requests)), 0

    async def worker() -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        for _ in left:
            writer.write(message)
            count = await _answer(reader)
            events += count
        writer.close()

    await asyncio.gather(*(worker() for _ in range(connections)))
    return events


async def _answer(reader: asyncio.StreamReader) -> int:
    """Read one answer, which must be a 200; return its events."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError(head.decode())
    if b"transfer-encoding: chunked" not in head:
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        return 0
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        body += await reader.readexactly(size + 2)
    await reader.readexactly(2)
    return body.count(b"data: ")


def _processes(pid: int) -> dict[str, int]:
    """Return the processes by their role; in a fleet those of its one replica, and the gateway."""
    fleet = {
        role: child
        for child in run.children(pid)
        for module, role in FLEET.items()
        if module in Path(f"/proc/{child}/cmdline").read_text()
    }
    if not fleet:
        return processes(pid)
    return {**processes(fleet["replica"]), "gateway": fleet["gateway"]}


def _cpu(pid: int) -> float:
    """Return the processor seconds of a process, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    main()
