"""Gains of settings of threads, allocator and bfloat16 for a speech model, each alone over the same base.

    python -m benchmarks.speech.settings [MODEL] [--on STEP …] [--only ROW …] [--tokens 64] [--rounds 7]
        [--loss] [--json FILE]

The settings of Arm's post on Whisper, as Torchwright's techniques or as the environment variable itself: oneDNN's bf16
mode, huge pages, other allocators, threads, threads that stay on their core, a larger cache of oneDNN's. MODEL is a
folder, or a random Whisper of the base shape. The base is transformers' modules in float32, eager, with the fixed
caches that every technique runs on; --on puts steps below every row (--on native_speech w8a8). Each row is a process of
its own. They take turns, and a gain is the median of the ratios of each turn, with its 95% interval. A setting that
cannot run here is a row with the technique's reason. --loss measures the metric, too, on eight windows a row.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.harness import run
from benchmarks.harness.contenders import context_of
from benchmarks.harness.run import Row, times, triple
from benchmarks.harness.turns import in_turns
from benchmarks.speech.speed import make
from torchwright.core.errors import TorchwrightError
from torchwright.core.records import Step
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.models.speech.workload import SpeechWorkload
from torchwright.optimization.techniques.base import in_order, parse_step
from torchwright.optimization.trial.client import Candidate, Context, TrialFailed, start_candidate
from torchwright.workloads.base import Run

BASE = "the base"
ROWS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    BASE: ((), {}),
    "the base once more": ((), {}),
    "threads:count=1": (("threads:count=1",), {}),
    "OMP_PROC_BIND=close": ((), {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}),
    "allocator": (("allocator",), {}),
    "allocator:kind=huge_pages": (("allocator:kind=huge_pages",), {}),
    "allocator:kind=tcmalloc": (("allocator:kind=tcmalloc",), {}),
    "allocator:kind=jemalloc": (("allocator:kind=jemalloc",), {}),
    "allocator:kind=mimalloc": (("allocator:kind=mimalloc",), {}),
    "LRU_CACHE_CAPACITY=1024": ((), {"LRU_CACHE_CAPACITY": "1024"}),
    "fast_math": (("fast_math",), {}),
    "fast_math + allocator:kind=huge_pages": (("fast_math", "allocator:kind=huge_pages"), {}),
    "dtype": (("dtype",), {}),
    "dtype + allocator": (("dtype", "allocator"), {}),
}
"""Row → steps over the base, and further environment variables of the process."""


class OnFixedCaches(SpeechWorkload):
    """The original as techniques meet it, so that a row's gain is its step's alone."""

    def original_run(self, model: nn.Module) -> Run:
        called = self.adapt(model)
        return lambda case: called(*case.args, **case.kwargs)


def main() -> None:
    on = run.Option(nargs="+", type=parse_step, default=[], metavar="STEP")
    asked = run.options(__doc__, "model?", on=on, only=tuple(ROWS), tokens=64, rounds=7, loss=False)
    rows = run.Rows(asked.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(asked.model) if asked.model else make("base", Path(tempfile.mkdtemp(dir=scratch)))
        workload = OnFixedCaches(folder, new_tokens=asked.tokens)
        with context_of(workload, Path(scratch), 3600) as context:
            names = [BASE, *(name for name in asked.only if name != BASE)]
            live, refused = start(context, tuple(asked.on), names, loss=asked.loss)
            in_turns({name: candidate.turn for name, candidate in live.items()}, asked.rounds)
            found = measured(live) + refused
    show(found, asked, rows)


def start(
    context: Context, below: tuple[Step, ...], names: list[str], *, loss: bool
) -> tuple[dict[str, Candidate], list[Row]]:
    """Return the candidates that run here, warm, and a row for each of the others."""
    live: dict[str, Candidate] = {}
    refused: list[Row] = []
    reference: Any = None
    for name in names:
        run.say(name)
        over, variables = ROWS[name]
        try:
            steps = in_order([*below, *map(parse_step, over)])
            candidate = start_candidate(context, steps, variables)
            if loss:
                reference = candidate.process.ask("observe") if reference is None else reference
                candidate.quality = candidate.process.ask("compare", reference=reference)
            candidate.process.ask("time")
            candidate.memory = candidate.process.ask("memory").peak
        except (TorchwrightError, TrialFailed) as error:
            if name == BASE:
                raise
            refused.append({"row": name, "refused": getattr(error, "found", None) or str(error)})
            continue
        live[name] = candidate
    return live, refused


def measured(live: dict[str, Candidate]) -> list[Row]:
    """Return a row for each candidate that ran."""
    base, rows = live[BASE], []
    for name, candidate in live.items():
        gains = {}
        for call in (None, *candidate.prepared.repeats):
            before, after = (
                [who.seconds(turn) if call is None else turn[call] for turn in who.turns]
                for who in (base, candidate)
            )
            gain = paired_speedup(before, after)
            gains[call or "window"] = triple(gain)
        rows.append(
            {
                "row": name,
                "seconds": candidate.measurement().seconds,
                "gains": gains,
                "memory": candidate.memory,
                "drop": candidate.quality.drop if candidate.quality else None,
            }
        )
    return rows


def show(found: list[Row], asked: argparse.Namespace, rows: run.Rows) -> None:
    below = " + ".join(map(str, asked.on)) or "transformers' modules, float32"
    titles = ("gain", "encode", "decode", "peak memory", "loss")
    run.head((f"over {below}", f"s a window of {asked.tokens} tokens", *titles))
    for row in found:
        if "refused" in row:
            rows.add(row, (row["row"], f"refused: {row['refused']}"))
            continue
        gains = [times(row["gains"][call]) for call in ("window", "encode", "decode")]
        loss = "-" if row["drop"] is None else f"{row['drop']:.2%}"
        memory = f"{row['memory'] / 2**20:.0f} MiB"
        rows.add(row, (row["row"], f"{row['seconds']:.3f}", *gains, memory, loss))
        if row["row"] != BASE:
            figures = {(row["row"], f"over {below}, {call}"): gain for call, gain in row["gains"].items()}
            model = Path(asked.model).name if asked.model else "Whisper base, random weights"
            rows.measured(model, figures, f"{asked.tokens} tokens")


if __name__ == "__main__":
    main()
