"""Language models on a CPU: Torchwright's decoder against the machine's bounds and, where they are given, its peers.

    python benchmarks/llm_cpu.py [--models DIR] [--shape NAME …] [--scheme none|w8a8|w4a8|w4a16 …] [--quick]
                                 [--openvino PYTHON FOLDER …] [--llama PYTHON FILE …] [--json FILE]

Random weights of real shapes (speed does not depend on the values). The bound of a decode step is its bytes (packed
weights, keys and values) over the measured read bandwidth; that of a prompt its operations over the measured matrix
rate of the type that the products are in; both as `torchwright bench` counts them. A shared machine's rates change
within seconds, so they are measured before and after each turn, and the better of the two is what that turn could have
had: "of bound" is the median of the turns' shares, "of the best" is against the best rate of the whole run. Ratios to
peers are medians of turns in one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import selectors
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import llm_shapes
import torchwright.models.decoder as native
import turns
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices import get_device
from torchwright.optimization.decode_bench import Sizes, Work, decode_work, point, prefill_work

PROMPT, NEW = 512, 32
ROUNDS = 7
CONTEXTS = (128, 512, 2048, 8192)
BATCHES = (1, 4, 16, 64)
STEPS = 24
"""Decode steps of which the median counts."""
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 13, 16, 24, 25, 32, 48, 64, 96, 128, 256, 512)
PEER_SECONDS = 300
Turn = dict[str, float]
PEERS = {"openvino": "OpenVINO GenAI", "llama": "llama.cpp", "vllm": "vLLM"}


class Machine:
    """The device's ceilings, measured around the contenders' turns; `facts` has the best so far."""

    def __init__(self) -> None:
        self._device = get_device("cpu")
        self.facts = self._device.facts()

    def around(self, turn: Callable[[], Turn]) -> tuple[Turn, DeviceFacts]:
        """A turn, and the better of what the device gave just before and just after it."""
        before = self._measured()
        found = turn()
        after = self._measured()
        now = _better(before, after)
        self.facts = _better(self.facts, now)
        return found, now

    def say(self) -> None:
        rates = ", ".join(f"{name} {rate:.2f}" for name, rate in self.facts.tflops.items())
        print(
            f"measured at best: read {self.facts.read_gb_per_s:.1f} GB/s; tera-operations per second: {rates}\n"
        )

    def _measured(self) -> DeviceFacts:
        found = self._device.measure()
        return dataclasses.replace(self.facts, read_gb_per_s=found.read_gb_per_s, tflops=dict(found.tflops))


def _better(one: DeviceFacts, other: DeviceFacts) -> DeviceFacts:
    rates = {kind: max(rate, one.tflops.get(kind, 0)) for kind, rate in other.tflops.items()}
    bandwidth = max(one.read_gb_per_s or 0, other.read_gb_per_s or 0)
    return dataclasses.replace(one, read_gb_per_s=bandwidth, tflops=rates)


class Ours:
    """The native decoder on one shape and scheme."""

    def __init__(self, folder: Path, scheme: str, kv: str) -> None:
        quantize = None if scheme == "none" else scheme
        self.name = f"torchwright {scheme.replace('none', 'bf16')}, kv {kv}"
        self.model = native.load_decoder(folder, dtype=torch.bfloat16, quantize=quantize, kv=kv)

    def turn(self, prompt: int, new: int, batch: int = 1) -> Turn:
        """Seconds of a prompt and of a step after it (`decode`: the mean; `step`: the median), `batch` sequences."""
        vocabulary = self.model.config.vocabulary
        ids = torch.randint(10, min(8000, vocabulary), (batch, prompt)).tolist()
        cache = self.model.new_cache([prompt + new] * batch)
        sequences = [cache.sequence(prompt) for _ in range(batch)]
        begun = time.perf_counter()
        for start in range(0, prompt, 512):
            parts = [row[start : start + 512] for row in ids]
            self._step(cache, sequences, parts)
        middle = time.perf_counter()
        steps = []
        for _ in range(new):
            before = time.perf_counter()
            self._step(cache, sequences, [[17]] * batch)
            steps.append(time.perf_counter() - before)
        if not steps:
            return {"prefill": middle - begun}
        mean, middle_step = statistics.mean(steps), statistics.median(steps)
        return {"prefill": middle - begun, "decode": mean, "step": middle_step}

    @torch.inference_mode()
    def _step(self, cache: Any, sequences: list[Any], parts: list[list[int]]) -> torch.Tensor:
        decoder = self.model.decoder
        batch = cache.append(list(zip(sequences, parts, strict=True)))
        return decoder.answer(batch, cache, batch.last_rows_B).values_NV.argmax(-1)

    def decode_bound(self, device: DeviceFacts, context: int, new: int, batch: int = 1) -> float:
        """Seconds of a decode step, the mean over `new` of them."""
        return _bound(
            device, decode_work(self.model, Sizes(batch=batch, prompt_tokens=context, new_tokens=new + 1))
        )

    def prefill_bound(self, device: DeviceFacts, prompt: int, batch: int = 1) -> float:
        """Seconds of a prompt of which only the last token is answered."""
        return _bound(
            device, prefill_work(self.model, Sizes(batch=batch, prompt_tokens=prompt, new_tokens=2))
        )


def _bound(device: DeviceFacts, work: Work) -> float:
    found = point("", 1.0, work, device)
    assert found is not None, "the machine's ceilings are not measured"
    return found.bound_seconds


class Peer:
    """A peer's script in an interpreter of its own, which answers lines with lines of JSON."""

    def __init__(self, kind: str, python: str, path: str, script: str = "llm_peer.py") -> None:
        self.name = f"{PEERS[kind]} {Path(path).stem}"
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), kind, path, str(torch.get_num_threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._answer()

    def turn(self, prompt: int, new: int) -> Turn:
        return self.ask(f"{prompt} {new}")

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            if not ready.select(PEER_SECONDS):
                raise RuntimeError(f"{self.name}: no answer in {PEER_SECONDS} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # vLLM's workers outlive it otherwise, and go on spinning
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Language models on a CPU against bounds and peers.")
    parser.add_argument(
        "--models", metavar="DIR", help="keep the random models here instead of a temporary folder"
    )
    parser.add_argument("--shape", action="append", choices=llm_shapes.SHAPES, help="may be repeated")
    parser.add_argument(
        "--scheme", action="append", help="none, w8a8, w4a8, w4a16, as `--quantize` takes them"
    )
    parser.add_argument("--kv", default="bf16", choices=("bf16", "int8"))
    parser.add_argument("--quick", action="store_true", help="the prompt of 512 and its decode only")
    parser.add_argument("--openvino", nargs=2, action="append", default=[], metavar=("PYTHON", "FOLDER"))
    parser.add_argument("--llama", nargs=2, action="append", default=[], metavar=("PYTHON", "FILE"))
    parser.add_argument("--json", metavar="FILE", help="write the rows here as they finish")
    options = parser.parse_args()
    turns.print_machine()
    machine = Machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.models or scratch)
        for shape in options.shape or ["llama-3.2-1b"]:
            rows += run(shape, llm_shapes.make(shape, folder), options, machine)
            turns.write_json(options.json, rows)


def run(shape: str, folder: Path, options: argparse.Namespace, machine: Machine) -> list[dict[str, Any]]:
    """One shape: every scheme, and the peers, in turn; then contexts and batches."""
    ours = []
    for scheme in options.scheme or ("none", "w8a8", "w4a8", "w4a16"):
        begun = time.perf_counter()
        ours.append(Ours(folder, scheme, options.kv))
        turns.say(f"{ours[-1].name}: loaded and packed in {time.perf_counter() - begun:.1f} s")
    peers: list[Peer] = []
    try:
        for kind in ("openvino", "llama"):
            for python, path in getattr(options, kind):
                peers.append(Peer(kind, python, path))
        rows = compare(shape, ours, peers, machine)
    finally:
        for peer in peers:
            peer.close()
    if not options.quick:
        for model in ours:
            rows += sweep(shape, model, machine)
    return rows


def compare(shape: str, ours: list[Ours], peers: list[Peer], machine: Machine) -> list[dict[str, Any]]:
    """A prompt of PROMPT tokens and NEW after it, all contenders in turn."""
    everyone: list[Any] = [*ours, *peers]
    for contender in everyone:
        contender.turn(PROMPT, 4)
    timed: dict[str, list[tuple[Turn, DeviceFacts]]] = {contender.name: [] for contender in everyone}
    for _ in range(ROUNDS):
        for contender in everyone:
            timed[contender.name].append(machine.around(lambda one=contender: one.turn(PROMPT, NEW)))
    middle = {
        name: {key: statistics.median(turn[key] for turn, _ in all_turns) for key in ("prefill", "decode")}
        for name, all_turns in timed.items()
    }
    machine.say()
    print(f"### {shape}: prompt of {PROMPT}, decode at {PROMPT} to {PROMPT + NEW}\n")
    print(
        "| contender | prefill, tok/s | of bound (of the best) | decode, tok/s | of bound (of the best) "
        "| over the best peer: prefill, decode |"
    )
    print("|---|---|---|---|---|---|")
    rows = []
    for contender in everyone:
        seconds = middle[contender.name]
        row: dict[str, Any] = {
            "shape": shape,
            "contender": contender.name,
            "prefill_tok_s": PROMPT / seconds["prefill"],
            "decode_tok_s": 1 / seconds["decode"],
        }
        bounds = ratios = ("", "")
        if isinstance(contender, Ours):
            bound = {
                "prefill": functools.partial(contender.prefill_bound, prompt=PROMPT),
                "decode": functools.partial(contender.decode_bound, context=PROMPT, new=NEW),
            }
            for call, of in bound.items():
                shares = [of(now) / turn[call] for turn, now in timed[contender.name]]
                row[f"{call}_of_bound"] = statistics.median(shares)
                row[f"{call}_of_best"] = of(machine.facts) / seconds[call]
            bounds = tuple(f"{row[f'{call}_of_bound']:.0%} ({row[f'{call}_of_best']:.0%})" for call in bound)
            if peers:
                best = {
                    call: min(middle[peer.name][call] for peer in peers) for call in ("prefill", "decode")
                }
                row |= {f"{call}_over_peers": best[call] / seconds[call] for call in best}
                ratios = tuple(f"{row[f'{call}_over_peers']:.2f}x" for call in best)
        rows.append(row)
        print(
            f"| {contender.name} | {row['prefill_tok_s']:.0f} | {bounds[0]} | {row['decode_tok_s']:.1f} | {bounds[1]} "
            f"| {', '.join(filter(None, ratios))} |",
            flush=True,
        )
    print()
    return rows


def sweep(shape: str, model: Ours, machine: Machine) -> list[dict[str, Any]]:
    """Contexts at batch 1, batches at a context of 128, and row counts of one forward call."""
    rows = []
    for context, batch in [*((context, 1) for context in CONTEXTS), *((128, batch) for batch in BATCHES[1:])]:
        turn, now = machine.around(lambda at=(context, STEPS, batch): model.turn(*at))
        seconds = turn["step"]
        rows.append({"context": context, "batch": batch, "decode_s": seconds, "tok_s": batch / seconds})
        rows[-1]["of_bound"] = model.decode_bound(now, context, STEPS, batch) / seconds
    print(
        f"### {shape}, {model.name}: decode\n\n| context | batch | tok/s | of the bytes' bound |\n|---|---|---|---|"
    )
    for row in rows:
        print(
            f"| {row['context']} | {row['batch']} | {row['tok_s']:.1f} | {row['of_bound']:.0%} |", flush=True
        )
    cliffs = []
    for count in ROWS:
        seconds = median(lambda count=count: model.turn(count, 0)["prefill"], 5)
        cliffs.append({"rows": count, "prefill_s": seconds, "tok_s": count / seconds})
    print(f"\n### {shape}, {model.name}: tokens of one forward call\n\n| rows | ms | tok/s |\n|---|---|---|")
    for row in cliffs:
        print(f"| {row['rows']} | {1e3 * row['prefill_s']:.1f} | {row['tok_s']:.0f} |", flush=True)
    print()
    return [{"shape": shape, "contender": model.name, **row} for row in [*rows, *cliffs]]


def median(measure: Callable[[], float], count: int) -> float:
    measure()
    return statistics.median(measure() for _ in range(count))


if __name__ == "__main__":
    main()
