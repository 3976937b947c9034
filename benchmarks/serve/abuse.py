"""Well-behaved streams next to clients that want too much of `torchwright serve`, one kind after the other.

    python -m benchmarks.serve.abuse [MODEL] [--minutes 10] [--streams 30] [--json FILE]

The bundled model without MODEL. The time is divided into equal parts: the streams alone, with each kind of attack of
`ATTACKS` (four connections that send again and again), and with all of them. Each part prints the p50 and p99 of
`/health` and of the gaps between a stream's events. Then come tokens a second, streams that were refused
or cut off (lost), and the attackers' answers. The last figure is the largest resident memory of the server's processes
(MB). The attackers are processes of their own.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import multiprocessing
import multiprocessing.synchronize
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness import run
from benchmarks.harness.run import Row
from benchmarks.serve.server import WORDS, processes, resident_mb, server

CONNECTIONS = 4
HEALTH_SECONDS, MEMORY_SECONDS = 0.05, 1.0
STREAM_TOKENS = 200
MB = 1_000_000
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
Request = tuple[str, bytes]


def _json(path: str, **body: Any) -> Request:
    return path, json.dumps(body).encode()


def _long_prompts(place: int) -> Request:
    """Return prompts of 20 kB to 4 MB, none of which fits, and one that a tokenizer must see."""
    text = "".join(random.Random(place).choices(WORDS, k=2000))
    sizes = (20_000, 4 * MB, 200_000, 4 * MB)
    text = (text * (4 * MB // len(text) + 1))[: sizes[place % len(sizes)]]
    return _json("/tokenize" if place % 5 == 4 else TEXT, prompt=text)


def _large_bodies(place: int) -> Request:
    """Return eight MB of wrong elements, of unknown names, of messages, of nesting, and more than is taken."""
    bodies = (
        ("/detokenize", b'{"tokens": [' + b"-1," * 2_700_000 + b"-1]}"),
        (TEXT, b'{"prompt": [' + b"{}," * 2_700_000 + b"{}]}"),
        (TEXT, b'{"prompt": "x", ' + b'"a": 0, ' * 1_000_000 + b'"b": 0}'),
        (CHAT, b'{"messages": [' + b'{"role": "user", "content": "a"},' * 2000 + b"{}]}"),
        (TEXT, b'{"prompt": ' + b"[" * 8 * MB),
        (TEXT, b'{"prompt": "' + b"x" * 20 * MB),
    )
    return bodies[place % len(bodies)]


def _schemas(place: int) -> Request:
    """Return a new schema of nine kB each time, for 48 prompts."""
    text = {"type": "string", "minLength": 1, "maxLength": 60, "description": "x" * 40}
    texts = {f"field_{place}_{number}": text for number in range(70)}
    schema = {"type": "object", "properties": texts, "required": list(texts)}
    return _json(TEXT, prompt=["x"] * 48, max_tokens=1, structured_outputs={"json": schema})


def _slow_grammars(place: int) -> Request:
    """Return grammars and regular expressions that take minutes, or make every mask slow."""
    forms = (
        {"grammar": "root ::= " + '"a"? ' * 3000 + f'"{place}"'},
        {"regex": f"((((a{{0,30}}b?){{0,30}}c?){{0,30}}d?){{0,300}}){{0,300}}{place}"},
        {"regex": f"(((a{{0,30}}b?){{0,30}}c?){{0,30}}){{1,9}}{place}"},
    )
    return _json(TEXT, prompt="x", structured_outputs=forms[place % len(forms)])


def _images(place: int) -> Request:
    """Return a message with an image of six MB."""
    part = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 540_000},
    }
    return _json(CHAT, messages=[{"role": "user", "content": [part]}])


ATTACKS: dict[str, Callable[[int], Request]] = {
    "long prompts": _long_prompts,
    "large bodies": _large_bodies,
    "schemas": _schemas,
    "slow grammars": _slow_grammars,
    "images": _images,
}


@dataclass
class Part:
    """The measurements in one part of the time."""

    health_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    memory_mb: dict[str, list[float]] = field(default_factory=dict)


def main() -> None:
    options = run.options(__doc__, "model?", minutes=10.0, streams=30)
    rows = run.Rows(options.json)
    seconds = 60 * options.minutes / (len(ATTACKS) + 2)
    parts: dict[str, list[str]] = {"alone": [], **{name: [name] for name in ATTACKS}, "all": list(ATTACKS)}
    with server(options.model) as (url, pid):
        asyncio.run(_measure(url, pid, options.streams, min(5.0, seconds), Part()))  # until all is warm
        for name, kinds in parts.items():
            row = attacked(name, kinds, url, pid, streams=options.streams, seconds=seconds)
            rows.add(row, json.dumps(row))


def attacked(name: str, kinds: list[str], url: str, pid: int, *, streams: int, seconds: float) -> Row:
    """Return the figures of one part of the time, with attackers of these kinds."""
    context = multiprocessing.get_context("spawn")
    end, answers = context.Event(), context.Queue()
    attackers = [context.Process(target=_attack, args=(kind, url, end, answers)) for kind in kinds]
    for attacker in attackers:
        attacker.start()
    part = Part()
    asyncio.run(_measure(url, pid, streams, seconds, part))
    end.set()
    answered: Counter[str] = Counter()
    for attacker in attackers:
        answered += answers.get()
        attacker.join()
    return {
        "part": name,
        "s": round(seconds, 1),
        "health_ms": _percentiles(part.health_s),
        "gap_ms": _percentiles(part.gaps_s),
        "tokens_per_s": round(part.tokens / seconds),
        "lost": dict(part.lost),
        "attackers": dict(sorted(answered.items())),
        "mb": {name: round(max(found)) for name, found in part.memory_mb.items()},
    }


async def _measure(url: str, pid: int, streams: int, seconds: float, part: Part) -> None:
    end = time.perf_counter() + seconds
    each = (_stream(url, place, end, part) for place in range(streams))
    await asyncio.gather(_health(url, end, part), _memory(pid, end, part), *each)


async def _health(url: str, end: float, part: Part) -> None:
    while time.perf_counter() < end:
        begun = time.perf_counter()
        reader, writer = await _send(url, b"GET", "/health", b"")
        try:
            status = await reader.readline()
            part.health_s.append(time.perf_counter() - begun)
            if b" 200 " not in status:
                part.lost[f"health {status!r}"] += 1
        finally:
            writer.close()
        await asyncio.sleep(HEALTH_SECONDS)


async def _memory(pid: int, end: float, part: Part) -> None:
    while time.perf_counter() < end:
        for name, process in processes(pid).items():
            part.memory_mb.setdefault(name, []).append(resident_mb(process))
        await asyncio.sleep(MEMORY_SECONDS)


async def _stream(url: str, place: int, end: float, part: Part) -> None:
    """Send one stream after the other; the gaps are between events of one."""
    draw = random.Random(place)
    asked = {"max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0.8}
    while time.perf_counter() < end:
        _, body = _json(TEXT, prompt=" ".join(draw.choices(WORDS, k=12)), **asked)
        reader, writer = await _send(url, b"POST", TEXT, body)
        try:
            status = await reader.readline()
            if b" 200 " not in status:
                part.lost[status.decode("latin-1").strip()] += 1
                continue
            last, whole = None, False
            while line := await reader.readline():
                if time.perf_counter() > end:
                    return
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    part.tokens += 1
                    if last is not None:
                        part.gaps_s.append(now - last)
                    last = now
                elif line.startswith(b"data: [DONE]"):
                    whole = True
            if not whole:
                part.lost["cut off"] += 1
        except OSError as error:
            part.lost[type(error).__name__] += 1
        finally:
            writer.close()


async def _send(
    url: str, method: bytes, path: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send one request on a connection of its own, which the server closes at the end."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = (
        f" {path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(method + head.encode() + body)
    return reader, writer


def _attack(
    kind: str, url: str, end: multiprocessing.synchronize.Event, answers: multiprocessing.Queue[Any]
) -> None:
    """Send one kind of request again and again over several connections, in a process of its own."""
    os.nice(5)  # the attackers share the server's machine, and are not measured
    counted: Counter[str] = Counter()
    places = itertools.count()

    def send() -> None:
        while not end.is_set():
            path, body = ATTACKS[kind](next(places))
            counted[f"{kind} {_status(url, path, body)}"] += 1

    threads = [threading.Thread(target=send) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put(counted)


def _status(url: str, path: str, body: bytes) -> str:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return str(response.status)
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


def _percentiles(found: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the largest, in milliseconds."""
    ordered = sorted(found)
    places = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
    return {name: round(1000 * ordered[place], 1) for name, place in places.items() if ordered}


if __name__ == "__main__":
    main()
