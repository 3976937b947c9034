"""Where a decode step spends its time, and what a step as one operator saves.

    python benchmarks/decode_step.py [MODEL] [--quantize w8a8] [--batch 1,16] [--context 256] [--rounds 200]
                                     [--sampling temperature=0.8 --sampling top_k=40] [--read] [--alone]
                                     [--json FILE]

Steps of three kinds take turns in one process, in an order that changes, so that other work on the machine meets all of
them: `calls` (every operator by itself), `layers` (token ids to hidden states one operator, output layer and choice
beside it) and `step` (token ids to logits one operator, and the choice by their peaks). Ratios are medians over the
rounds, with 95% intervals; tokens of all three must be equal. The shares are of `step`. `--read` also sums an array of
as many bytes as a step reads, in turn with it: what the machine reads at the time. `--alone` computes on one thread and
counts that thread's processor time, in which others' turns on a busy machine are not. The bundled model without MODEL.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import turns
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.models.decoder import LoadedDecoder, Sampler, Sampling, load_decoder, model
from torchwright.models.decoder.cache import CacheSequence
from torchwright.models.decoder.plan import MOST_ROWS
from torchwright.models.decoder.scores import Logits
from torchwright.optimization.decode_bench import Sizes, decode_work
from torchwright.workloads.language import BUNDLED

FIRST = 17


class Steps:
    """Decode steps of some sequences at one context: each is wound back, so that all see the same."""

    def __init__(
        self, loaded: LoadedDecoder, batch: int, context: int, sampling: Sampling, clock: Callable[[], float]
    ) -> None:
        self.loaded, self.decoder, self.clock = loaded, loaded.decoder, clock
        ids = torch.randint(10, min(8000, loaded.config.vocabulary), (batch, context)).tolist()
        self.cache = loaded.new_cache([context + 1] * batch)
        self.sequences: list[CacheSequence] = [self.cache.sequence(context) for _ in range(batch)]
        self.samplers = [Sampler(sampling, row, seed) for seed, row in enumerate(ids)]
        for sequence, row in zip(self.sequences, ids, strict=True):
            for start in range(0, context, 512):
                self.decoder(self.cache.append([(sequence, row[start : start + 512])]), self.cache)
        self.context = context

    def run(self, kind: str) -> tuple[float, dict[str, float], list[int]]:
        """Seconds of a step, those of its parts, and its tokens."""
        marks = [("", self.clock())]

        def mark(part: str) -> None:
            marks.append((part, self.clock()))

        with self.loaded.on_threads():
            batch = self.cache.append([(sequence, [FIRST]) for sequence in self.sequences])
            mark("cache")
            if kind == "step":
                logits = self.decoder.answer(batch, self.cache, batch.last_rows_B)
                mark("operator")
            else:
                model.MOST_ROWS = 0 if kind == "calls" else MOST_ROWS
                hidden_TE = self.decoder(batch, self.cache)
                model.MOST_ROWS = MOST_ROWS
                mark("layers")
                logits = Logits(self.decoder.logits(hidden_TE[batch.last_rows_B]))
                mark("output layer")
            tokens = [sampler.choose(*logits.row(row)) for row, sampler in enumerate(self.samplers)]
            mark("choice")
        mark("threads")
        for sequence in self.sequences:
            self.cache.rewind(sequence, self.context)
        parts = {part: end - begin for (_, begin), (part, end) in pairwise(marks)}
        return marks[-1][1] - marks[0][1], parts, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Where a decode step spends its time.")
    parser.add_argument("model", nargs="?", default=str(BUNDLED))
    parser.add_argument("--quantize", default="w8a8", help="(default: %(default)s)")
    parser.add_argument("--batch", default="1", metavar="N,…")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--sampling", action="append", default=[], metavar="OPTION=NUMBER")
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    turns.print_machine()
    given = dict(text.split("=") for text in options.sampling)
    sampling = Sampling.of(
        {name: int(value) if name == "top_k" else float(value) for name, value in given.items()}
    )
    loaded = load_decoder(Path(options.model), dtype=torch.bfloat16, quantize=options.quantize)
    if options.alone:
        torch.set_num_threads(1)
    clock = time.thread_time if options.alone else time.perf_counter
    rows: list[dict[str, Any]] = []
    for batch in map(int, options.batch.split(",")):
        with torch.inference_mode():
            steps = Steps(loaded, batch, options.context, sampling, clock)
            rows.append(vars(options) | {"batch": batch} | measure(steps, options.rounds, options.read))
        print("\n".join(f"{key}: {value}" for key, value in rows[-1].items()), flush=True)
    turns.write_json(options.json, rows)


def measure(steps: Steps, rounds: int, read: bool) -> dict[str, Any]:
    sizes = Sizes(batch=len(steps.sequences), prompt_tokens=steps.context, new_tokens=2)
    moved = decode_work(steps.loaded, sizes).bytes
    x = torch.ones(int(moved) // 4) if read else torch.empty(0)
    kinds: dict[str, Callable[[], Any]] = {
        kind: lambda kind=kind: steps.run(kind) for kind in ("calls", "layers", "step")
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in (*kinds, "read")}
    parts: dict[str, list[float]] = {}
    for _ in range(rounds):
        wanted: list[int] | None = None
        for kind in random.sample([*kinds], len(kinds)):
            took, split, tokens = kinds[kind]()
            seconds[kind].append(took)
            wanted = wanted or tokens
            assert tokens == wanted, f"{kind} chooses other tokens"
            if kind == "step":
                for part, time_of in split.items():
                    parts.setdefault(part, []).append(time_of / took)
        if read:
            begun = steps.clock()
            x.sum()
            seconds["read"].append(steps.clock() - begun)
    found: dict[str, Any] = {
        f"{kind}_ms": statistics.median(times) * 1e3 for kind, times in seconds.items() if times
    }
    found["mbytes"] = moved / 1e6
    found["shares"] = {part: round(statistics.median(share), 3) for part, share in parts.items()}
    for before in ("calls", "layers"):
        found[f"{before}_over_step"] = str(paired_speedup(seconds[before], seconds["step"]))
    if read:
        found["read_rate"] = str(paired_speedup(seconds["read"], seconds["step"]))
    return found


if __name__ == "__main__":
    main()
