"""Serving on a CPU: Torchwright's engine under several kinds of traffic, against its peers and against itself.

    python -m benchmarks.serve.speed [--models DIR] [--quantize w4a8] [--quick] [--only PART …] [--json FILE]
                                     [--openvino PYTHON FOLDER] [--vllm PYTHON FOLDER]

Parts:

- `load`: many requests at once, and the peers on the same in turn
- `poisson`: requests that arrive by chance
- `prefix`: 90% of each prompt shared, one request after another and as traffic
- `schema`: JSON by a schema against free text
- `ngram`: speculation on text that repeats itself
- `http`: the server against the engine called directly

Llama-3.2-1B's shape with random weights, and for `ngram` also the bundled model, which writes text. --models keeps the
random model in DIR; --quick takes 16 requests of 128 in and 64 out alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.harness import run
from benchmarks.harness.peers import Peer
from benchmarks.harness.run import BUNDLED, Row
from benchmarks.llm import native, shapes
from benchmarks.serve.server import event, server
from torchwright.models.decoder.cache import PAGE
from torchwright.models.decoder.generation.generate import LoadedDecoder
from torchwright.models.decoder.load import load_decoder
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.memory import CacheSize
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import SamplingOptions, Submit

SHAPE = "llama-3.2-1b"
ROUNDS = 3
LOADS = ((1, 128, 64), (4, 128, 64), (16, 128, 64), (32, 128, 64), (64, 128, 64), (16, 512, 128))
"""Requests at once, tokens of each prompt, new tokens of each."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 50},
    },
    "required": ["name", "size", "tags"],
}
PARTS = ("load", "poisson", "prefix", "schema", "ngram", "http")


@dataclass
class Life:
    """One request: its arrival, and the clock at each of its tokens."""

    arrived: float
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrived

    @property
    def tpot(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)


def random_ids(count: int, vocabulary: int = 8000) -> list[int]:
    return [random.randrange(10, vocabulary) for _ in range(count)]


def request(ids: list[int], new: int, **more: Any) -> Submit:
    sampling = more.pop("sampling", SamplingOptions(temperature=0.0))
    return Submit(id=str(random.getrandbits(64)), ids=ids, max_tokens=new, sampling=sampling, **more)


def requests(count: int, prompt: int, new: int) -> list[Submit]:
    return [request(random_ids(prompt), new) for _ in range(count)]


def make_engine(model: LoadedDecoder, tokens: int, **options: Any) -> ServingEngine:
    """Return an engine with room for `tokens` and a page more for each running sequence."""
    found = EngineOptions(**{"speculate": "none", **options})
    size = CacheSize(tokens // PAGE + 2 * found.max_running, found.max_running)
    return ServingEngine(model, size=size, options=found)


def drive(
    engine: ServingEngine, submits: Sequence[Submit], arrivals: Sequence[float] | None = None
) -> list[Life]:
    """Run requests that arrive at the given seconds (without them all at once), and record their tokens."""
    begun = time.perf_counter()
    waiting = list(zip(arrivals or [0.0] * len(submits), submits, strict=True))
    lives: dict[str, Life] = {}
    while waiting or not engine.idle:
        now = time.perf_counter() - begun
        while waiting and waiting[0][0] <= now:
            arrival, submit = waiting.pop(0)
            refused = engine.submit(submit)
            assert refused is None, refused
            lives[submit.id] = Life(arrived=begun + arrival)
        if engine.idle:
            time.sleep(max(0.0, waiting[0][0] - now))
            continue
        for output in engine.step().outputs:
            lives[output.id].tokens += [time.perf_counter()] * len(output.tokens)
    return list(lives.values())


def rate(lives: Sequence[Life]) -> float:
    """Return the new tokens of all requests per second, from the first arrival to the last token."""
    seconds = max(life.tokens[-1] for life in lives) - min(life.arrived for life in lives)
    return sum(len(life.tokens) for life in lives) / seconds


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(found) for name, found in values.items()}


def by_chance(count: int, per_second: float) -> list[float]:
    """Return arrivals of a Poisson process, in seconds; the first is at 0."""
    gaps = (random.expovariate(per_second) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


def load(model: LoadedDecoder, peers: dict[str, Peer], quick: bool) -> Iterator[Row]:
    """Send requests at once, every contender in turn."""
    for count, prompt, new in [LOADS[2]] if quick else LOADS:
        rates: dict[str, list[float]] = {name: [] for name in ("torchwright", *peers)}
        for _ in range(ROUNDS):
            engine = make_engine(model, count * (prompt + new))
            rates["torchwright"].append(rate(drive(engine, requests(count, prompt, new))))
            for name, peer in peers.items():
                rates[name].append(count * new / peer.ask(count, prompt, new))
        found = medians(rates)
        best = max((value for name, value in found.items() if name != "torchwright"), default=None)
        row: Row = {"part": "load", "requests": count, "prompt": prompt, "new": new, "tok_s": found}
        yield row | {"over_the_best_peer": best and found["torchwright"] / best}


def poisson(model: LoadedDecoder) -> Iterator[Row]:
    """Send 40 requests of 128 in and 64 out that arrive by chance, at half and nine tenths of the rate that fits."""
    full = rate(drive(make_engine(model, 16 * 192), requests(16, 128, 64))) / 64
    for share in (0.5, 0.9):
        arrivals = by_chance(41, share * full)[1:]
        lives = drive(make_engine(model, 40 * 192), requests(40, 128, 64), arrivals)
        row: Row = {"part": "poisson", "share_of_capacity": share, "per_second": share * full}
        for name in ("ttft", "tpot"):
            values = sorted(getattr(life, name) for life in lives)
            row[f"{name}_p50_s"] = statistics.median(values)
            row[f"{name}_p99_s"] = values[min(len(values) - 1, round(0.99 * len(values)))]
        yield row


def prefix(model: LoadedDecoder) -> Iterator[Row]:
    """Send prompts of 1,000 tokens of which 900 are shared: the first token's delay, cold and with a cached prefix."""
    found: dict[str, list[float]] = {"cold_ttft_s": [], "warm_over_cold": []}
    for _ in range(ROUNDS):
        engine = make_engine(model, 8 * 1024)
        shared = random_ids(900)
        first, *rest = (drive(engine, [request(shared + random_ids(100), 4)])[0].ttft for _ in range(5))
        found["cold_ttft_s"].append(first)
        found["warm_over_cold"].append(statistics.median(rest) / first)
    yield {"part": "prefix", **medians(found)}
    yield prefix_traffic(model)


def prefix_traffic(model: LoadedDecoder) -> Row:
    """Send 24 requests of 480 tokens, 432 of them shared, that arrive by chance: with the prefix cache, and without.

    They come at four fifths of the rate that fits without it. The shared tokens are cached when the first arrives.
    """
    shared = random_ids(432)
    some = lambda count: [request(shared + random_ids(48), 8) for _ in range(count)]
    cold = make_engine(model, 24 * 512, prefix_cache=False)
    begun = time.perf_counter()
    drive(cold, some(6))
    apart = (time.perf_counter() - begun) / 6 / 0.8
    arrivals = by_chance(24, 1 / apart)
    row: Row = {"part": "prefix traffic", "seconds_apart": apart}
    for name, engine in (("cold", cold), ("warm", make_engine(model, 24 * 512))):
        drive(engine, some(1))
        values = sorted(life.ttft for life in drive(engine, some(24), arrivals))
        row |= {f"{name}_ttft_p50_s": statistics.median(values), f"{name}_ttft_p99_s": values[-1]}
    return row | {"warm_over_cold": row["warm_ttft_p50_s"] / row["cold_ttft_p50_s"]}


def schema(model: LoadedDecoder) -> Iterator[Row]:
    """Compare JSON by a schema with free text of as many tokens, 16 requests at once."""
    import xgrammar

    from torchwright.serve.grammar.masks import tokenizer_info

    info = tokenizer_info(model.folder, model.config.vocabulary, list(model.stop))
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA)).serialize_json()
    rates: dict[str, list[float]] = {"free": [], "schema": []}
    for _ in range(2 * ROUNDS):
        for name in rates:
            more: Row = {"grammar": grammar, "stop_ids": list(model.stop)} if name == "schema" else {}
            more["sampling"] = SamplingOptions(temperature=0.8, seed=random.getrandbits(32))
            asked = [request(random_ids(64, 4000), 64, **more) for _ in range(16)]
            rates[name].append(rate(drive(make_engine(model, 16 * 256), asked)))
    found = medians(rates)
    yield {"part": "schema", **found, "schema_over_free": found["schema"] / found["free"]}


def ngram(model: LoadedDecoder, ids: list[int]) -> Iterator[Row]:
    """Complete a prompt that repeats itself: tokens per second with speculation over without."""
    found: dict[str, list[float]] = {"none": [], "ngram": []}
    outputs: dict[str, list[int]] = {}
    for _ in range(ROUNDS):
        for how in found:
            engine = make_engine(model, 1024, speculate=how)
            engine.submit(request(ids, 128))
            begun, tokens = 0.0, []
            while not engine.idle:
                for output in engine.step().outputs:
                    begun = begun or time.perf_counter()
                    tokens += output.tokens
            found[how].append((len(tokens) - 1) / (time.perf_counter() - begun))
            outputs[how] = tokens
    assert outputs["none"] == outputs["ngram"], "speculation changed the answer"
    rates = medians(found)
    ratio = rates["ngram"] / rates["none"]
    yield {"part": "ngram", "layers": model.config.layers, **rates, "ngram_over_none": ratio}


def over_http(folder: Path, quantize: str, model: LoadedDecoder) -> Iterator[Row]:
    """Stream 16 requests of 128 in and 64 out through the server, and the same on the engine, in turn."""
    with server(str(folder), "--quantize", quantize, "--speculate", "none") as (url, _):
        rates: dict[str, list[float]] = {"engine": [], "http": []}
        asyncio.run(streams(url, 4, 16, 8))
        for _ in range(ROUNDS):
            rates["engine"].append(rate(drive(make_engine(model, 16 * 192), requests(16, 128, 64))))
            begun = time.perf_counter()
            tokens = asyncio.run(streams(url, 16, 128, 64))
            rates["http"].append(tokens / (time.perf_counter() - begun))
    found = medians(rates)
    yield {"part": "http", **found, "http_over_engine": found["http"] / found["engine"]}


async def streams(url: str, count: int, prompt: int, new: int) -> int:
    """Return the new tokens of `count` completions that stream at the same time."""
    asked = {"max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    asked |= {"stream_options": {"include_usage": True}}

    async def one(client: httpx.AsyncClient) -> int:
        usage: Row = {}
        body = {"prompt": random_ids(prompt), **asked}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                usage = (event(line) or {}).get("usage") or usage
        return usage["completion_tokens"]

    async with httpx.AsyncClient(timeout=300) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(count))))


def main() -> None:
    peers_of = native.peer_options("openvino", "vllm")
    options = run.options(__doc__, models=str, quantize="w4a8", quick=False, only=PARTS, **peers_of)
    rows = run.Rows(options.json)
    random.seed(0)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = shapes.make(SHAPE, Path(options.models or scratch))
        served = with_tokenizer(folder, Path(scratch))
        model = load_decoder(folder, torch.bfloat16, options.quantize)
        small = load_decoder(BUNDLED, torch.bfloat16, "w8a8")
        peers: dict[str, Peer] = {}
        if "load" in options.only:
            peers = native.start_peers("benchmarks.serve.speed_peer", options, ("openvino", "vllm"), stack)
        every = {
            "load": lambda: load(model, peers, options.quick),
            "poisson": lambda: poisson(model),
            "prefix": lambda: prefix(model),
            "schema": lambda: schema(load_decoder(served, torch.bfloat16, options.quantize)),
            "ngram": lambda: itertools.chain(
                ngram(small, small.text.encode((BUNDLED / "eval.txt").read_text()[:600] * 3)),
                ngram(model, random_ids(64) * 3),
            ),
            "http": lambda: over_http(served, options.quantize, model),
        }
        for part in options.only:
            for row in every[part]():
                rows.add(row, json.dumps(row))


def with_tokenizer(folder: Path, scratch: Path) -> Path:
    """Return a folder of the model with the bundled tokenizer, which the server needs."""
    target = scratch / "served"
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path.resolve())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (BUNDLED / name).is_file() and not (target / name).exists():
            shutil.copy(BUNDLED / name, target / name)
    return target


if __name__ == "__main__":
    main()
