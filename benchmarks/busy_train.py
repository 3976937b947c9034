"""Training on a busy machine: the README's `torchwright train` against the same command on one thread.

    python benchmarks/busy_train.py [--rounds 3] [--tokens 10240] [--processes 12] [--threads 2] [--json FILE]

Both run in turn, each in a fresh process, while other processes multiply matrices. A run's speed is its tokens over
the seconds of its steps, without the first line of figures. Exit status 1 where a command fails, or where the median of
the rounds' ratios is below 0.8.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from busy import neighbours
from torchwright.train.run.history import read_history

LEAST = 0.8
"""Acceptance of issue 59: share of the speed on one thread."""
BUNDLED = Path(__file__).parents[1] / "src" / "torchwright" / "workloads" / "bundled"
WORDS = ["--model", str(BUNDLED), "--data", str(BUNDLED / "calibration.txt"), "--lora"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=10_240, help="of each run (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=12, help="neighbours (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each neighbour (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rounds here")
    options = parser.parse_args()
    rounds = list[dict[str, Any]]()
    with (
        tempfile.TemporaryDirectory() as folder,
        neighbours(options.processes, options.threads),
    ):
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
        options.json.write_text("".join(json.dumps(each) + "\n" for each in rounds))
    ratio = statistics.median(each["ratio"] for each in rounds)
    print(f"median {ratio:.2f} of the speed on one thread; at least {LEAST} is wanted")
    return int(ratio < LEAST)


def trained(out: Path, tokens: int, environment: dict[str, str]) -> dict[str, Any]:
    """Run one training; return tokens per second of its steps, and the threads of its end."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "torchwright", "train", *WORDS, "--set", f"tokens={tokens}"]
    done = subprocess.run(
        [*command, "--quiet", "-o", str(out)],
        env=inherited | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    history = read_history(out)
    seen, speeds = history.series("tokens"), dict(history.series("tokens_per_s"))
    pairs = list(itertools.pairwise(seen))
    seconds = sum((after - before) / speeds[step] for (_, before), (step, after) in pairs)
    changes = [event["threads"] for event in history.of("threads")]
    threads = changes[-1] if changes else history.start["threads"]
    return {"speed": (seen[-1][1] - seen[0][1]) / seconds, "threads": threads, "changes": changes}


if __name__ == "__main__":
    sys.exit(main())
