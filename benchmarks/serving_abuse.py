"""Well-behaved streams beside clients that want too much of `torchwright serve`, one kind after the other.

    python benchmarks/serving_abuse.py [MODEL] [--minutes 10] [--streams 30] [--json FILE]

The bundled model without MODEL. The time is divided into equal parts: the streams alone, beside each kind of attack of
`ATTACKS` (four connections that send again and again), and beside all of them. Each part prints the p50 and p99 of
`/health` and of the gaps between a stream's events, tokens a second, streams that were refused or cut off (lost), how
the attackers were answered, and what the server's processes have resident at most (MB). The attackers are processes of
their own.
"""

from __future__ import annotations

import argparse
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

import turns
from serving_load import WORDS, children, resident_mb, server

CONNECTIONS = 4
HEALTH_SECONDS, MEMORY_SECONDS = 0.05, 1.0
STREAM_TOKENS = 200
MB = 1_000_000

Request = tuple[str, bytes]


def _json(path: str, **body: Any) -> Request:
    return path, json.dumps(body).encode()


def _long_prompts(place: int) -> Request:
    """Prompts of 20 kB to 4 MB, none of which fits, and one that a tokenizer must see."""
    text = "".join(random.Random(place).choices(WORDS, k=2000))
    sizes = (20_000, 4 * MB, 200_000, 4 * MB)
    text = (text * (4 * MB // len(text) + 1))[: sizes[place % len(sizes)]]
    if place % 5 == 4:
        return _json("/tokenize", prompt=text)
    return _json("/v1/completions", prompt=text)


def _large_bodies(place: int) -> Request:
    """Eight MB of wrong elements, of unknown names, of messages, of nesting, and more than is taken."""
    bodies = (
        ("/detokenize", b'{"tokens": [' + b"-1," * 2_700_000 + b"-1]}"),
        ("/v1/completions", b'{"prompt": [' + b"{}," * 2_700_000 + b"{}]}"),
        ("/v1/completions", b'{"prompt": "x", ' + b'"a": 0, ' * 1_000_000 + b'"b": 0}'),
        ("/v1/chat/completions", b'{"messages": [' + b'{"role": "user", "content": "a"},' * 2000 + b"{}]}"),
        ("/v1/completions", b'{"prompt": ' + b"[" * 8 * MB),
        ("/v1/completions", b'{"prompt": "' + b"x" * 20 * MB),
    )
    return bodies[place % len(bodies)]


def _schemas(place: int) -> Request:
    """A new schema of nine kB each time, for 48 prompts."""
    texts = {
        f"field_{place}_{number}": {
            "type": "string",
            "minLength": 1,
            "maxLength": 60,
            "description": "x" * 40,
        }
        for number in range(70)
    }
    schema = {"type": "object", "properties": texts, "required": list(texts)}
    form = {"json": schema}
    return _json("/v1/completions", prompt=["x"] * 48, max_tokens=1, structured_outputs=form)


def _slow_grammars(place: int) -> Request:
    """Grammars and regular expressions that take minutes, or make every mask slow."""
    forms = (
        {"grammar": "root ::= " + '"a"? ' * 3000 + f'"{place}"'},
        {"regex": f"((((a{{0,30}}b?){{0,30}}c?){{0,30}}d?){{0,300}}){{0,300}}{place}"},
        {"regex": f"(((a{{0,30}}b?){{0,30}}c?){{0,30}}){{1,9}}{place}"},
    )
    return _json("/v1/completions", prompt="x", structured_outputs=forms[place % len(forms)])


def _images(place: int) -> Request:
    """A picture of six MB in a message."""
    url = "data:image/png;base64," + "iVBORw0KGgo" * 540_000
    part = {"type": "image_url", "image_url": {"url": url}}
    return _json("/v1/chat/completions", messages=[{"role": "user", "content": [part]}])


ATTACKS: dict[str, Callable[[int], Request]] = {
    "long prompts": _long_prompts,
    "large bodies": _large_bodies,
    "schemas": _schemas,
    "slow grammars": _slow_grammars,
    "images": _images,
}


@dataclass
class Part:
    """What was measured in one part of the time."""

    health_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    memory_mb: dict[str, list[float]] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams beside clients that want too much.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=30)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    turns.print_machine()
    seconds = 60 * options.minutes / (len(ATTACKS) + 2)
    parts: dict[str, list[str]] = {"alone": [], **{name: [name] for name in ATTACKS}, "all": list(ATTACKS)}
    rows: list[dict[str, Any]] = []
    with server(*([options.model] if options.model else [])) as (url, pid):
        asyncio.run(_measure(url, pid, options.streams, min(5.0, seconds), Part()))  # until all is warm
        for name, kinds in parts.items():
            rows.append(attacked(name, kinds, url, pid, streams=options.streams, seconds=seconds))
            print(json.dumps(rows[-1]), flush=True)
    turns.write_json(options.json, rows)


def attacked(
    name: str, kinds: list[str], url: str, pid: int, *, streams: int, seconds: float
) -> dict[str, Any]:
    """The figures of one part of the time, with attackers of these kinds."""
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
    await asyncio.gather(
        _health(url, end, part),
        _memory(pid, end, part),
        *(_stream(url, place, end, part) for place in range(streams)),
    )


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
        for name, process in {"http": pid, **children(pid)}.items():
            part.memory_mb.setdefault(name, []).append(resident_mb(process))
        await asyncio.sleep(MEMORY_SECONDS)


async def _stream(url: str, place: int, end: float, part: Part) -> None:
    """One stream after the other; the gaps are between events of one."""
    draw = random.Random(place)
    while time.perf_counter() < end:
        _, body = _json(
            "",
            prompt=" ".join(draw.choices(WORDS, k=12)),
            max_tokens=STREAM_TOKENS,
            ignore_eos=True,
            stream=True,
            temperature=0.8,
        )
        reader, writer = await _send(url, b"POST", "/v1/completions", body)
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
    """One request on a connection of its own, which the server closes at the end."""
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
    """In a process of its own: several connections that send one kind of request again and again."""
    os.nice(5)  # the server's machine is the attackers', too, and not what is measured
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
    """The median, the 99th percentile and the largest, in milliseconds."""
    if not found:
        return {}
    ordered = sorted(found)
    places = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
    return {name: round(1000 * ordered[place], 1) for name, place in places.items()}


if __name__ == "__main__":
    main()
