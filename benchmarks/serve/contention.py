"""Throughput next to busy neighbours, compared with the share of the cores that is left.

    python -m benchmarks.serve.contention [MODEL] [--neighbours 0 1 2 4] [--streams 50] [--seconds 5] [--rounds 3]
                                          [--part engine|server] [--json FILE]

A neighbour is a process that does nothing but compute. `engine` counts the tokens of an engine in this process,
`server` those that clients of `torchwright serve` get, over HTTP; the bundled model without MODEL. Fair scheduling
leaves a program with a thread for each of C cores C / (C + neighbours) of them. Each round takes every number of
neighbours once; the figures are medians over rounds. A row's `factor` is that share over the throughput that was left:
1 is all that there is to have.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import torch

from benchmarks.harness import run
from benchmarks.harness.neighbours import neighbours
from benchmarks.serve.server import event, server
from torchwright.models.decoder.load import load_decoder
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.memory import CacheSize
from torchwright.serve.wire.messages import SamplingOptions, Submit

Rate = Callable[[float], float]
"""Seconds → tokens a second."""


def main() -> None:
    parts = run.Option(choices=("engine", "server"), default="engine")
    options = run.options(
        __doc__, "model?", neighbours=[0, 1, 2, 4], streams=50, seconds=5.0, rounds=3, part=parts
    )
    rows = run.Rows(options.json)
    counts = options.neighbours
    with (engine if options.part == "engine" else served)(options.model, options.streams) as rate:
        found: dict[int, list[float]] = {count: [] for count in counts}
        rate(options.seconds)
        for _ in range(options.rounds):
            for count in counts:
                with neighbours(count):
                    found[count].append(rate(options.seconds))
    cores = len(os.sched_getaffinity(0))
    for count in counts:
        left = statistics.median(found[count]) / statistics.median(found[counts[0]])
        share = cores / (cores + count)
        row = {"neighbours": count, "tokens_s": found[count], "left": left, "share": share}
        spread = " ".join(f"{tokens:,.0f}" for tokens in found[count])
        text = f"{count} neighbours: {spread} tokens/s; {left:.2f} left of {share:.2f}: {share / left:.2f}x"
        rows.add(row | {"factor": share / left}, text)


@contextlib.contextmanager
def engine(model: str | None, streams: int) -> Iterator[Rate]:
    """Yield a function that counts the tokens a second of an engine that always has so many sequences."""
    loaded = load_decoder(Path(model) if model else run.BUNDLED, dtype=torch.bfloat16)
    made = ServingEngine(loaded, size=CacheSize(4096, 64))
    named = iter(range(1 << 30))

    def fill() -> None:
        for index in range(streams - made.stats().running - made.stats().waiting):
            sampling = SamplingOptions(temperature=1.0, seed=index)
            submit = Submit(id=f"{next(named)}", ids=[1, 2, 3, 4], max_tokens=400, sampling=sampling)
            refused = made.submit(submit)
            assert refused is None, refused

    def rate(seconds: float) -> float:
        began, before = time.perf_counter(), made.stats().generated_tokens
        while time.perf_counter() < began + seconds:
            fill()
            made.step()
        return (made.stats().generated_tokens - before) / (time.perf_counter() - began)

    try:
        yield rate
    finally:
        made.close()


@contextlib.contextmanager
def served(model: str | None, streams: int) -> Iterator[Rate]:
    """Yield a function that counts the tokens a second of so many clients, each of which asks again when answered."""
    with server(model) as (url, _):
        yield lambda seconds: asyncio.run(_clients(url, streams, seconds))


async def _clients(url: str, streams: int, seconds: float) -> float:
    began, tokens = time.perf_counter(), 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal tokens
        body = {"prompt": "def ", "max_tokens": 400, "stream": True, "temperature": 1.0, "ignore_eos": True}
        while True:
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    tokens += len((event(line) or {"choices": ()})["choices"])

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(client(http) for _ in range(streams)))
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
