"""What settings of threads, allocator and bfloat16 gain a speech model here, each alone over the same base.

    python benchmarks/speech_settings.py [MODEL] [--on STEP …] [--only ROW …] [--tokens 64] [--rounds 7]
        [--loss] [--json FILE]

The settings of Arm's post on Whisper, as Torchwright's techniques where it has one and as the environment variable
itself where it has none: oneDNN's bf16 mode, huge pages, other allocators, threads, threads that stay on their core, a
larger cache of oneDNN's. MODEL is a folder, or a random Whisper of the base shape. The base is transformers' modules in
float32, eager, with the fixed caches that every technique runs on; --on puts steps below every row (--on native_speech
w8a8). Each row is a process of its own; they take turns, and a gain is the median of the ratios of each turn, with its
95% interval. What cannot run here is a row with the reason in the technique's own words.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

import turns
from speech import make
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
"""Row → steps over the base, and variables of the process beside theirs."""


class OnFixedCaches(SpeechWorkload):
    """The original as techniques meet it, so that a row's gain is its step's alone."""

    def original_run(self, model: nn.Module) -> Run:
        called = self.adapt(model)
        return lambda case: called(*case.args, **case.kwargs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--on", nargs="+", type=parse_step, default=[], metavar="STEP")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--loss", action="store_true", help="of the metric, too, which takes eight windows a row"
    )
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    turns.print_machine()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.model or make("base", Path(tempfile.mkdtemp(dir=scratch)))
        workload = OnFixedCaches(folder, new_tokens=asked.tokens)
        with turns.context_of(workload, Path(scratch), 3600) as context:
            names = [BASE, *(name for name in asked.only if name != BASE)]
            live, rows = start(context, tuple(asked.on), names, loss=asked.loss)
            for _, order in zip(range(asked.rounds), turns.orders(list(live.values())), strict=False):
                for candidate in order:
                    candidate.turn()
            rows = measured(live) + rows
    show(rows, asked)
    turns.write_json(asked.json, rows)
    return 0


def start(
    context: Context, below: tuple[Step, ...], names: list[str], *, loss: bool
) -> tuple[dict[str, Candidate], list[dict[str, Any]]]:
    """Those that run here, warm; a row for each of the others."""
    live: dict[str, Candidate] = {}
    refused: list[dict[str, Any]] = []
    reference: Any = None
    for name in names:
        turns.say(name)
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


def measured(live: dict[str, Candidate]) -> list[dict[str, Any]]:
    """A row for each that ran."""
    base, rows = live[BASE], []
    for name, candidate in live.items():
        gains = {}
        for call in (None, *candidate.prepared.repeats):
            before, after = (
                [who.seconds(turn) if call is None else turn[call] for turn in who.turns]
                for who in (base, candidate)
            )
            gain = paired_speedup(before, after)
            gains[call or "window"] = [gain.value, gain.low, gain.high]
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


def show(rows: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    below = " + ".join(map(str, asked.on)) or "transformers' modules, float32"
    print(
        f"| over {below} | s a window of {asked.tokens} tokens | gain | encode | decode | peak memory | loss |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        if "refused" in row:
            print(f"| {row['row']} | refused: {row['refused']} |")
            continue
        gains = {call: "{:.2f}x [{:.2f}, {:.2f}]".format(*gain) for call, gain in row["gains"].items()}
        print(
            f"| {row['row']} | {row['seconds']:.3f} | {gains['window']} | {gains['encode']} | {gains['decode']} "
            f"| {row['memory'] / 2**20:.0f} MiB | {'-' if row['drop'] is None else format(row['drop'], '.2%')} |"
        )


if __name__ == "__main__":
    raise SystemExit(main())
