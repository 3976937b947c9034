"""Training on a busy machine: the README's `torchwright train` against the same command on one thread.

    python -m benchmarks.train.busy [--rounds 3] [--tokens 10240] [--processes 12] [--threads 2] [--json FILE]

Both run in turn, each in a fresh process, while other processes multiply matrices. A run's speed is its tokens over
the seconds of its steps, without the first line of figures. Exit status 1 if a command fails, or if the median of the
rounds' ratios is below 0.8.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import run
from benchmarks.harness.neighbours import multiplying
from benchmarks.harness.run import BUNDLED, Row
from torchwright.train.run.observe.history import read_history

LEAST = 0.8
"""Accepted share of the speed on one thread."""


def main() -> int:
    options = run.options(__doc__, rounds=3, tokens=10_240, processes=12, threads=2)
    rounds = list[Row]()
    with tempfile.TemporaryDirectory() as folder, multiplying(options.processes, options.threads):
        for number in range(options.rounds):
            chosen = trained(Path(folder) / f"chosen-{number}", options.tokens, {})
            one = trained(Path(folder) / f"one-{number}", options.tokens, {"OMP_NUM_THREADS": "1"})
            rounds.append({"chosen": chosen, "one": one, "ratio": chosen["speed"] / one["speed"]})
            print(
                f"round {number + 1}: {chosen['speed']:.0f} tok/s on {chosen['threads']} threads, "
                f"{one['speed']:.0f} tok/s with OMP_NUM_THREADS=1: {rounds[-1]['ratio']:.2f}",
                flush=True,
            )
    if options.json:
        Path(options.json).write_text("".join(json.dumps(each) + "\n" for each in rounds))
    ratio = statistics.median(each["ratio"] for each in rounds)
    print(f"median {ratio:.2f} of the speed on one thread; at least {LEAST} is wanted")
    return int(ratio < LEAST)


def trained(out: Path, tokens: int, environment: dict[str, str]) -> Row:
    """Run one training; return tokens per second of its steps, and the threads of its end."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = ("train", "--model", BUNDLED, "--data", BUNDLED / "calibration.txt", "--lora")
    run.torchwright(*words, "--set", f"tokens={tokens}", "--quiet", "-o", out, env=inherited | environment)
    history = read_history(out)
    seen, speeds = history.series("tokens"), dict(history.series("tokens_per_s"))
    pairs = list(itertools.pairwise(seen))
    seconds = sum((after - before) / speeds[step] for (_, before), (step, after) in pairs)
    changes = [event["threads"] for event in history.of("threads")]
    threads = changes[-1] if changes else history.start["threads"]
    return {"speed": (seen[-1][1] - seen[0][1]) / seconds, "threads": threads, "changes": changes}


if __name__ == "__main__":
    sys.exit(main())
