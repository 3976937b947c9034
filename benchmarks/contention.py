"""Throughput beside busy neighbours: what is left of it, against the share of the cores that is left.

    python benchmarks/contention.py [MODEL] [--neighbours 0,1,2,4] [--streams 50] [--seconds 5] [--rounds 3]
                                    [--part engine|server] [--json FILE]

A neighbour is a process that does nothing but compute. `engine` counts the tokens of an engine in this process,
`server` those that clients of `torchwright serve` get, over HTTP; the bundled model without MODEL. Fair scheduling
leaves a program with a thread for each of C cores C / (C + neighbours) of them. Each round takes every number of
neighbours once; the figures are medians over rounds. A row's `factor` is that share over the throughput that was left:
1 is all that there is to have.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

import turns
from serving_load import server
from torchwright.models.decoder.load import load_decoder
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.wire.messages import SamplingOptions, Submit
from torchwright.workloads.language import BUNDLED

PROMPT = "def "
SETTLE_S = 1.0
"""After neighbours have come or gone."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput beside busy neighbours.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--neighbours", default="0,1,2,4")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("engine", "server"), default="engine")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    turns.print_machine()
    counts = [int(count) for count in options.neighbours.split(",")]
    with (engine if options.part == "engine" else served)(options.model, options.streams) as rate:
        rows = measure(rate, counts, options.seconds, options.rounds)
    turns.write_json(options.json, rows)


def measure(
    rate: Callable[[float], float], counts: list[int], seconds: float, rounds: int
) -> list[dict[str, Any]]:
    """A row for each number of neighbours, with tokens a second in every round."""
    found: dict[int, list[float]] = {count: [] for count in counts}
    rate(seconds)
    for _ in range(rounds):
        for count in counts:
            with neighbours(count):
                found[count].append(rate(seconds))
    cores = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    for count in counts:
        left = statistics.median(found[count]) / statistics.median(found[counts[0]])
        share = cores / (cores + count)
        rows.append(
            {
                "neighbours": count,
                "tokens_s": found[count],
                "left": left,
                "share": share,
                "factor": share / left,
            }
        )
        spread = " ".join(f"{tokens:,.0f}" for tokens in found[count])
        print(
            f"{count} neighbours: {spread} tokens/s; {left:.2f} left of {share:.2f}: {share / left:.2f}x",
            flush=True,
        )
    return rows


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """That many busy processes for the length of the block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextlib.contextmanager
def engine(model: str | None, streams: int) -> Iterator[Callable[[float], float]]:
    """What counts the tokens a second of an engine that always has so many sequences."""
    loaded = load_decoder(Path(model) if model else BUNDLED, dtype=torch.bfloat16)
    made = ServingEngine(loaded, pages=4096)
    named = iter(range(1 << 30))

    def fill() -> None:
        for index in range(streams - made.stats().running - made.stats().waiting):
            sampling = SamplingOptions(temperature=1.0, seed=index)
            refused = made.submit(
                Submit(id=f"{next(named)}", ids=[1, 2, 3, 4], max_tokens=400, sampling=sampling)
            )
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
def served(model: str | None, streams: int) -> Iterator[Callable[[float], float]]:
    """What counts the tokens a second that so many clients of a server get, each asking again when it is answered."""
    with server(*([model] if model else [])) as (url, _):
        yield lambda seconds: asyncio.run(_clients(url, streams, seconds))


async def _clients(url: str, streams: int, seconds: float) -> float:
    began, tokens = time.perf_counter(), 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal tokens
        body = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "temperature": 1.0, "ignore_eos": True}
        while True:
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        tokens += len(json.loads(line[6:])["choices"])

    async with httpx.AsyncClient(
        base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)
    ) as http:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(client(http) for _ in range(streams)))
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
