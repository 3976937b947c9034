"""Mixed clients of `torchwright serve` while its engine is killed again and again next to busy processes.

    python -m benchmarks.serve.soak [MODEL] [--minutes 30] [--kill-every 60] [--busy 2] [--clients 8] [--json FILE]

The bundled model without MODEL. Clients send requests of all `KINDS` by turns: OpenAI and Anthropic, whole and
streamed, with tools and schemas, streams that are left early, and bad requests. Each request must end with a right
answer, the expected refusal, a 503, or an error event in a stream that had begun; anything else is lost. Memory is
what each process has resident, the engine's at the end of each life; growth compares the medians of the first and
the last quarter after a fifth of the time has passed. Exit code 1 if a request is lost or memory grows by over 5%.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.harness import run
from benchmarks.harness.neighbours import neighbours
from benchmarks.serve.server import WORDS, processes, resident_mb, server

GROWTH = 0.05
"""The most by which resident memory may grow after the warm-up, as a share."""
WARM_SHARE = 0.2
"""The share of the time after which pools and caches are taken to be full."""
LOOK_SECONDS = 1.0
AGAIN_SECONDS = 0.5
"""The pause of a client after a 503; shorter than `Retry-After`, so that many requests meet a restart."""
TOOL = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}
CHAT, TEXT, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/messages"

Check = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Kind:
    """A kind of request: its path, its body without the prompt, and the check of its answer."""

    path: str
    body: dict[str, Any] = field(default_factory=dict)
    right: Check = lambda answer: True
    status: int = 200
    leaves: bool = False
    """True if the client leaves the stream after its first event."""


def _tool_is_right(answer: dict[str, Any]) -> bool:
    [choice] = answer["choices"]
    if _is_cut(choice):
        return True
    calls = choice["message"]["tool_calls"]
    named = [json.loads(call["function"]["arguments"])["city"] for call in calls]
    return len(named) > 0 and set(named) <= {"Rome", "Oslo"}


def _schema_is_right(answer: dict[str, Any]) -> bool:
    [choice] = answer["choices"]
    return _is_cut(choice) or json.loads(choice["message"]["content"])["n"] in (1, 2, 3)


def _is_cut(choice: dict[str, Any]) -> bool:
    """Check whether `max_tokens` ended an answer, which need not be whole then."""
    return choice["finish_reason"] == "length"


def _has_usage(answer: dict[str, Any]) -> bool:
    return answer["usage"]["completion_tokens"] > 0 and bool(answer["choices"][0]["finish_reason"])


KINDS = {
    "completion": Kind(TEXT, right=_has_usage),
    "chat": Kind(CHAT, right=_has_usage),
    "text stream": Kind(TEXT, {"stream": True}),
    "chat stream": Kind(CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
    "anthropic": Kind(ANTHROPIC, right=lambda answer: bool(answer["stop_reason"])),
    "anthropic stream": Kind(ANTHROPIC, {"stream": True}),
    "tools": Kind(
        CHAT,
        {
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}],
            "tool_choice": "required",
            "max_tokens": 100,
        },
        right=_tool_is_right,
    ),
    "schema": Kind(
        CHAT,
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "max_tokens": 60,
        },
        right=_schema_is_right,
    ),
    "leaves": Kind(TEXT, {"stream": True, "max_tokens": 200, "ignore_eos": True}, leaves=True),
    "bad value": Kind(CHAT, {"temperature": -1}, status=400),
    "bad field": Kind(TEXT, {"no_such_field": 1}, status=400),
    "bad schema": Kind(
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": 5}}}},
        status=400,
    ),
}


@dataclass
class Found:
    """Outcomes of requests and the memory of processes."""

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    memory_mb: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Process → (seconds since the start, resident MB)."""
    engines: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Process id of an engine → the last that was seen of its memory."""
    kills: int = 0

    def lose(self, kind: str, reason: str) -> None:
        self.outcomes[f"{kind}: lost"] += 1
        self.lost.append(f"{kind}: {reason}")
        print(f"lost: {kind}: {reason}", flush=True)


def main() -> int:
    options = run.options(__doc__, "model?", minutes=30.0, kill_every=60.0, busy=2, clients=8)
    rows = run.Rows(options.json)
    # The server and the busy processes end as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    found, seconds = Found(), 60 * options.minutes
    with server(options.model) as (url, pid), neighbours(options.busy):
        asyncio.run(soak(url, pid, seconds, options.kill_every, options.clients, found))
    row = judged(found, seconds)
    rows.add(row, json.dumps(row, indent=1))
    return 0 if row["holds"] else 1


async def soak(url: str, pid: int, seconds: float, kill_every: float, clients: int, found: Found) -> None:
    """Send requests, kill engines and read memory for so many seconds; then ask once more of each kind."""
    begun = time.monotonic()
    end = begun + seconds
    places = itertools.count()
    names = list(KINDS)

    async def client(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            await ask(http, names[next(places) % len(names)], draw, found)

    limits = httpx.Limits(max_connections=2 * clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        await asyncio.gather(
            _look(pid, begun, end, found),
            _kill(pid, kill_every, end, found),
            *(client(number) for number in range(clients)),
        )
        await _until_ready(http)
        last = Found()
        for name in names:
            await ask(http, name, random.Random(0), last)
        for name in names:
            if not last.outcomes[f"{name}: {_expected(name)}"]:
                found.lose(name, f"not answered at the end: {dict(last.outcomes)}")


def _expected(name: str) -> str:
    kind = KINDS[name]
    return "left" if kind.leaves else "answered" if kind.status == 200 else "refused"


async def _until_ready(http: httpx.AsyncClient) -> None:
    for _ in range(120):
        if (await http.get("/ready")).status_code == 200:
            return
        await asyncio.sleep(1)


async def _kill(pid: int, every: float, end: float, found: Found) -> None:
    while time.monotonic() + every < end:
        await asyncio.sleep(every)
        engine = processes(pid).get("engine")
        if engine is not None:
            os.kill(engine, signal.SIGKILL)
            found.kills += 1


async def _look(pid: int, begun: float, end: float, found: Found) -> None:
    """Read the memory of each process; an engine counts when it has been seen for the last time."""
    while time.monotonic() < end:
        now = time.monotonic() - begun
        for name, process in processes(pid).items():
            with contextlib.suppress(OSError, AssertionError):  # it has just ended
                seen = (now, resident_mb(process))
                if name == "engine":
                    found.engines[process] = seen
                else:
                    found.memory_mb.setdefault(name, []).append(seen)
        await asyncio.sleep(LOOK_SECONDS)


async def ask(http: httpx.AsyncClient, name: str, draw: random.Random, found: Found) -> None:
    """Send one request and count its outcome."""
    kind = KINDS[name]
    text = " ".join(draw.choices(WORDS, k=draw.randint(2, 40)))
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 60), "temperature": 0.8}
    body |= {"prompt": text} if kind.path == TEXT else {"messages": [{"role": "user", "content": text}]}
    body |= kind.body
    try:
        if body.get("stream"):
            outcome = await _streamed(http, kind, body)
        else:
            response = await http.post(kind.path, json=body)
            outcome = _outcome(kind, response.status_code, response.content)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        found.lose(name, f"{type(error).__name__}: {error}")
        return
    if outcome in ("answered", "refused", "left", "503", "error event"):
        found.outcomes[f"{name}: {outcome}"] += 1
    else:
        found.lose(name, outcome)
    if outcome == "503":
        await asyncio.sleep(AGAIN_SECONDS)


def _outcome(kind: Kind, status: int, content: bytes) -> str:
    answer = json.loads(content)
    if status == 503:
        return "503" if answer["error"]["message"] else "a 503 without a message"
    if status != kind.status:
        return f"status {status}: {content[:300]!r}"
    if status != 200:
        return "refused" if answer["error"]["message"] else f"a {status} without a message"
    return "answered" if kind.right(answer) else f"a wrong answer: {content[:600]!r}"


async def _streamed(http: httpx.AsyncClient, kind: Kind, body: dict[str, Any]) -> str:
    """Read a stream to its end; OpenAI's ends with `[DONE]`, Anthropic's with `message_stop`."""
    async with http.stream("POST", kind.path, json=body) as response:
        if response.status_code != 200:
            return _outcome(kind, response.status_code, await response.aread())
        finished = done = False
        async for line in response.aiter_lines():
            if line == "event: error":
                return "error event"
            if not line.startswith("data: "):
                continue
            if kind.leaves:
                return "left"
            data = line.removeprefix("data: ")
            done = done or data == "[DONE]" or '"message_stop"' in data
            finished = finished or any(f'"{key}":"' in data for key in ("finish_reason", "stop_reason"))
        return "answered" if finished and done else f"cut off (finish reason {finished}, end {done})"


def judged(found: Found, seconds: float) -> dict[str, Any]:
    """Return the figures and the verdict."""
    by_process = {**found.memory_mb, "engine": sorted(found.engines.values())}
    growth = {name: _growth(seen, WARM_SHARE * seconds) for name, seen in by_process.items()}
    requests = sum(found.outcomes.values())
    grown = [name for name, share in growth.items() if share is not None and share > GROWTH]
    return {
        "holds": not found.lost and not grown and requests > 0,
        "seconds": seconds,
        "kills": found.kills,
        "requests": requests,
        "lost": found.lost[:50],
        "outcomes": dict(sorted(found.outcomes.items())),
        "growth": growth,
        "mb": {
            name: [round(mb) for _, mb in seen[:: max(1, len(seen) // 30)]]
            for name, seen in by_process.items()
        },
    }


def _growth(seen: list[tuple[float, float]], warm_s: float) -> float | None:
    """The growth from the first to the last quarter of what was seen after the warm-up; None for too little."""
    warm = [mb for at, mb in seen if at >= warm_s]
    if len(warm) < 4:
        return None
    part = len(warm) // 4
    return statistics.median(warm[-part:]) / statistics.median(warm[:part]) - 1


if __name__ == "__main__":
    sys.exit(main())
