"""What `deterministic = true` gives and costs: two runs compared bit by bit, and the times of their steps in turns.

    python benchmarks/deterministic_runs.py [--steps N] [--turns N] [--seconds S] [--threads T] [--json FILE]

The bundled model from random weights on its own texts, as in train_cpu.py. Each run is `python -m torchwright train` in
a process of its own; compared are every step's loss and the bytes of the trained model. Ratios are medians over turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import train_cpu
import turns
from torchwright.core.paths import file_digest
from torchwright.train.run.metrics import read_figures

NAMES = ("torchwright", "torchwright, deterministic")


def trained(folder: Path, steps: int, **how: Any) -> tuple[list[float], str]:
    """The losses of a run of its own, and the SHA-256 of its trained weights."""
    folder.mkdir()
    path = train_cpu.run_file(folder, tokens=steps * train_cpu.BATCH_TOKENS, log_every=1, **how)
    command = [sys.executable, "-m", "torchwright", "train", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    losses = [line["loss"] for line in read_figures(folder / "out").values() if "loss" in line]
    return losses, file_digest(folder / "out" / "model" / "model.safetensors")


def rates(threads: int, seconds: float, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Tokens per second of both, by the wall clock and by processor time, in turns."""
    server = get_context("spawn")
    pipes: dict[str, Connection] = {}
    with tempfile.TemporaryDirectory() as folder:
        train_cpu.windows(Path(folder))
        processes = []
        for name in NAMES:
            ours, theirs = server.Pipe()
            arguments = (name, folder, threads, seconds, theirs)
            processes.append(server.Process(target=train_cpu.contender, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes[name] = ours
            ours.recv()
        found = turns.ask_in_turns(pipes, rounds)
        for pipe in pipes.values():
            pipe.send(False)
        for process in processes:
            process.join(30)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one contender's turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    turns.print_machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for deterministic in (True, False):
            how = {"threads": options.threads, "deterministic": deterministic}
            pair = [
                trained(Path(folder) / f"{deterministic}-{one}", options.steps, **how)
                for one in ("one", "other")
            ]
            same = {"losses": pair[0][0] == pair[1][0], "weights": pair[0][1] == pair[1][1]}
            rows.append({"deterministic": deterministic, "losses": [losses for losses, _ in pair], **same})
            print(
                f"deterministic = {str(deterministic).lower()}: {options.steps} steps twice, losses "
                f"{'equal' if same['losses'] else 'differ'}, weights {'equal' if same['weights'] else 'differ'}",
                flush=True,
            )
    found = rates(options.threads, options.seconds, options.turns)
    wall, cpu = turns.median_ratios(found[NAMES[1]], found[NAMES[0]])
    rows.append({"wall": wall, "processor": cpu, "tokens_per_s": found})
    print(f"a deterministic step has {wall:.2f} of the speed of the other, {cpu:.2f} by processor time")
    turns.write_json(options.json, rows)


if __name__ == "__main__":
    main()
