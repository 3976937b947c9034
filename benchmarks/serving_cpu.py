"""Serving on a CPU: Torchwright's engine under several kinds of traffic, against its peers and against itself.

    python benchmarks/serving_cpu.py [--models DIR] [--quantize w4a8] [--quick] [--only PART …] [--json FILE]
                                     [--openvino PYTHON FOLDER] [--vllm PYTHON FOLDER]

Parts: `load` (many requests at once, and the peers on the same in turn), `poisson` (requests that arrive by chance),
`prefix` (90% of each prompt shared: one request after another, and as traffic), `schema` (JSON by a schema against free
text), `ngram` (speculation on text that repeats itself), `http` (the server against the engine called directly).
Llama-3.2-1B's shape with random weights, and for `ngram` also the bundled model, which writes text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import llm_shapes
import turns
from llm_cpu import Peer
from torchwright.models.decoder.cache import PAGE
from torchwright.models.decoder.generate import LoadedDecoder
from torchwright.models.decoder.load import load_decoder
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import SamplingOptions, Submit
from torchwright.workloads.language import BUNDLED

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


@dataclass
class Life:
    """When one request's tokens came, in seconds from its arrival."""

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
    sampling = SamplingOptions(temperature=0.0)
    return Submit(id=str(random.getrandbits(64)), ids=ids, max_tokens=new, sampling=sampling, **more)


def make_engine(model: LoadedDecoder, tokens: int, **options: Any) -> ServingEngine:
    """An engine with room for `tokens` and a page more for each running sequence."""
    found = EngineOptions(**{"speculate": "none", **options})
    return ServingEngine(model, pages=tokens // PAGE + 2 * found.max_running, options=found)


def drive(
    engine: ServingEngine, requests: Sequence[Submit], arrivals: Sequence[float] | None = None
) -> list[Life]:
    """Run requests that arrive at the given seconds (all at once without), and note when tokens come."""
    begun = time.perf_counter()
    waiting = list(zip(arrivals or [0.0] * len(requests), requests, strict=True))
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
    """New tokens of all requests per second, from the first arrival to the last token."""
    seconds = max(life.tokens[-1] for life in lives) - min(life.arrived for life in lives)
    return sum(len(life.tokens) for life in lives) / seconds


def load(model: LoadedDecoder, peers: Sequence[Peer], quick: bool) -> Iterator[dict[str, Any]]:
    """Requests at once, every contender in turn."""
    for count, prompt, new in [LOADS[2]] if quick else LOADS:
        rates: dict[str, list[float]] = {"torchwright": [], **{peer.name: [] for peer in peers}}
        for _ in range(ROUNDS):
            engine = make_engine(model, count * (prompt + new))
            requests = [request(random_ids(prompt), new) for _ in range(count)]
            rates["torchwright"].append(rate(drive(engine, requests)))
            for peer in peers:
                rates[peer.name].append(count * new / peer.ask(f"{count} {prompt} {new}")["seconds"])
        found = {name: statistics.median(values) for name, values in rates.items()}
        best = max((value for name, value in found.items() if name != "torchwright"), default=None)
        yield {
            "part": "load",
            "requests": count,
            "prompt": prompt,
            "new": new,
            "tok_s": found,
            "over_the_best_peer": best and found["torchwright"] / best,
        }


def poisson(model: LoadedDecoder) -> Iterator[dict[str, Any]]:
    """40 requests of 128 in and 64 out that arrive by chance, at half and at nine tenths of the rate that fits."""
    full = rate(drive(make_engine(model, 16 * 192), [request(random_ids(128), 64) for _ in range(16)])) / 64
    for share in (0.5, 0.9):
        arrivals, at = [], 0.0
        for _ in range(40):
            at += random.expovariate(share * full)
            arrivals.append(at)
        engine = make_engine(model, 40 * 192)
        lives = drive(engine, [request(random_ids(128), 64) for _ in arrivals], arrivals)
        row: dict[str, Any] = {"part": "poisson", "share_of_capacity": share, "per_second": share * full}
        for name in ("ttft", "tpot"):
            values = sorted(getattr(life, name) for life in lives)
            row[f"{name}_p50_s"] = statistics.median(values)
            row[f"{name}_p99_s"] = values[min(len(values) - 1, round(0.99 * len(values)))]
        yield row


def prefix(model: LoadedDecoder) -> Iterator[dict[str, Any]]:
    """Prompts of 1,000 tokens of which 900 are shared: the first token's delay, cold and with the prefix there."""
    ratios, colds = [], []
    for _ in range(ROUNDS):
        engine = make_engine(model, 8 * 1024)
        shared = random_ids(900)
        cold = drive(engine, [request(shared + random_ids(100), 4)])[0].ttft
        warm = [drive(engine, [request(shared + random_ids(100), 4)])[0].ttft for _ in range(4)]
        ratios.append(statistics.median(warm) / cold)
        colds.append(cold)
    yield {
        "part": "prefix",
        "cold_ttft_s": statistics.median(colds),
        "warm_over_cold": statistics.median(ratios),
    }
    yield prefix_traffic(model)


def prefix_traffic(model: LoadedDecoder) -> dict[str, Any]:
    """24 requests of 480 tokens, 432 of them shared, that arrive by chance: with the prefix cache, and without.

    They come at four fifths of the rate that fits without it. The shared tokens are cached when the first arrives.
    """
    shared = random_ids(432)

    def requests() -> list[Submit]:
        return [request(shared + random_ids(48), 8) for _ in range(24)]

    cold = make_engine(model, 24 * 512, prefix_cache=False)
    begun = time.perf_counter()
    drive(cold, requests()[:6])
    apart = (time.perf_counter() - begun) / 6 / 0.8
    arrivals, at = [], 0.0
    for _ in range(24):
        arrivals.append(at)
        at += random.expovariate(1 / apart)
    found: dict[str, list[float]] = {}
    for name, engine in (("cold", cold), ("warm", make_engine(model, 24 * 512))):
        drive(engine, requests()[:1])
        found[name] = sorted(life.ttft for life in drive(engine, requests(), arrivals))
    row: dict[str, Any] = {"part": "prefix traffic", "seconds_apart": apart}
    for name, values in found.items():
        row[f"{name}_ttft_p50_s"] = statistics.median(values)
        row[f"{name}_ttft_p99_s"] = values[-1]
    row["warm_over_cold"] = row["warm_ttft_p50_s"] / row["cold_ttft_p50_s"]
    return row


def schema(model: LoadedDecoder) -> Iterator[dict[str, Any]]:
    """JSON by a schema against free text of as many tokens, 16 requests at once."""
    import xgrammar

    from torchwright.serve.grammar.masks import tokenizer_info

    info = tokenizer_info(model.folder, model.config.vocabulary, list(model.stop))
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA)).serialize_json()
    rates: dict[str, list[float]] = {"free": [], "schema": []}
    for _ in range(2 * ROUNDS):
        for name in rates:
            more = {"grammar": grammar, "stop_ids": list(model.stop)} if name == "schema" else {}
            engine = make_engine(model, 16 * 256)
            sampling = SamplingOptions(temperature=0.8, seed=random.getrandbits(32))
            requests = [
                Submit(id=str(i), ids=random_ids(64, 4000), max_tokens=64, sampling=sampling, **more)
                for i in range(16)
            ]
            rates[name].append(rate(drive(engine, requests)))
    found = {name: statistics.median(values) for name, values in rates.items()}
    yield {"part": "schema", **found, "schema_over_free": found["schema"] / found["free"]}


def ngram(model: LoadedDecoder, ids: list[int]) -> Iterator[dict[str, Any]]:
    """A prompt that repeats itself: tokens per second with speculation over without."""
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
    rates = {how: statistics.median(values) for how, values in found.items()}
    ratio = rates["ngram"] / rates["none"]
    yield {"part": "ngram", "layers": model.config.layers, **rates, "ngram_over_none": ratio}


def http(folder: Path, quantize: str, model: LoadedDecoder) -> Iterator[dict[str, Any]]:
    """16 streamed requests of 128 in and 64 out through the server, and the same on the engine, in turn."""
    with server(folder, quantize) as port:
        rates: dict[str, list[float]] = {"engine": [], "http": []}
        asyncio.run(streams(port, 4, 16, 8))
        for _ in range(ROUNDS):
            engine = make_engine(model, 16 * 192)
            rates["engine"].append(rate(drive(engine, [request(random_ids(128), 64) for _ in range(16)])))
            begun = time.perf_counter()
            tokens = asyncio.run(streams(port, 16, 128, 64))
            rates["http"].append(tokens / (time.perf_counter() - begun))
    found = {name: statistics.median(values) for name, values in rates.items()}
    yield {"part": "http", **found, "http_over_engine": found["http"] / found["engine"]}


@contextlib.contextmanager
def server(folder: Path, quantize: str) -> Iterator[int]:
    """`torchwright serve` on a free port, once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(folder), "--port", str(port), "--quantize", quantize, "--speculate", "none"]
    command = [str(Path(sys.executable).with_name("torchwright")), *words]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"the server did not become ready: {log.read().decode()[-500:]}")
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()
            process.wait(30)


def _is_ready(port: int) -> bool:
    import httpx

    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    return False


async def streams(port: int, count: int, prompt: int, new: int) -> int:
    """New tokens of `count` completions that stream at the same time."""
    import httpx

    async def one(client: Any) -> int:
        body = {
            "prompt": random_ids(prompt),
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage: dict[str, Any] = {}
        async with client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if '"usage":{' in line.replace(" ", ""):
                    usage = json.loads(line.removeprefix("data: "))["usage"]
        return usage["completion_tokens"]

    async with httpx.AsyncClient(timeout=300) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(count))))


PARTS = ("load", "poisson", "prefix", "schema", "ngram", "http")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serving on a CPU under several kinds of traffic.")
    parser.add_argument("--models", metavar="DIR", help="keep the random model here")
    parser.add_argument("--quantize", default="w4a8")
    parser.add_argument(
        "--quick", action="store_true", help="of `load`, 16 requests of 128 in and 64 out only"
    )
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--openvino", nargs=2, action="append", default=[], metavar=("PYTHON", "FOLDER"))
    parser.add_argument("--vllm", nargs=2, action="append", default=[], metavar=("PYTHON", "FOLDER"))
    parser.add_argument("--json", metavar="FILE", help="write the rows here as they finish")
    options = parser.parse_args()
    turns.print_machine()
    random.seed(0)
    parts, rows = options.only or PARTS, []
    peers: list[Peer] = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = llm_shapes.make(SHAPE, Path(options.models or scratch))
        served = with_tokenizer(folder, Path(scratch))
        model = load_decoder(folder, torch.bfloat16, options.quantize)
        small = load_decoder(BUNDLED, torch.bfloat16, "w8a8")
        if "load" in parts:
            for kind in ("openvino", "vllm"):
                for python, path in getattr(options, kind):
                    peers.append(Peer(kind, python, path, script="serving_peer.py"))
                    stack.callback(peers[-1].close)
        every = {
            "load": lambda: load(model, peers, options.quick),
            "poisson": lambda: poisson(model),
            "prefix": lambda: prefix(model),
            "schema": lambda: schema(load_decoder(served, torch.bfloat16, options.quantize)),
            "ngram": lambda: itertools.chain(
                ngram(small, small.text.encode((BUNDLED / "eval.txt").read_text()[:600] * 3)),
                ngram(model, random_ids(64) * 3),
            ),
            "http": lambda: http(served, options.quantize, model),
        }
        for part in parts:
            for row in every[part]():
                rows.append(row)
                print(json.dumps(row), flush=True)
                turns.write_json(options.json, rows)


def with_tokenizer(folder: Path, scratch: Path) -> Path:
    """The model's folder with the bundled tokenizer beside it: the server wants one."""
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
