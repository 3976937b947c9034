"""A run under `torchrun --max-restarts` whose processes are killed at random moments, against the same run undisturbed.

    python -m benchmarks.train.random_kills [--kills 8] [--steps 300] [--seed N] [--json FILE]

Four processes train a small model (`dp_shard = 4`). Between kills lie random times, of a mean that spreads them over
the run, whatever it is doing then: starting, meeting, stepping, writing a checkpoint. One process or two get SIGKILL.
Nothing is done by hand. The exit code is 1 unless losses and the last checkpoint are bitwise equal, and the ledger has
every second.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.harness import run
from benchmarks.harness.run import Row, children
from torchwright.train.ledger import read_account
from torchwright.train.run.observe.metrics import read_figures
from torchwright.train.run.runtime.checkpoint import FOLDER, whole

WORLD, RESTARTS = 4, 20
VOCABULARY, ROWS, CONTEXT = 128, 8, 32
RUN = f"""
out = "out"
tokens = {{tokens}}
batch_tokens = {ROWS * CONTEXT}
context = {CONTEXT}
precision = "fp32"
log_every = 1
peak_tflops = 1.0
threads = 1
timeout_s = 300
[model.config]
architectures = ["LlamaForCausalLM"]
model_type = "llama"
vocab_size = {VOCABULARY}
hidden_size = 64
intermediate_size = 96
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 128
rms_norm_eps = 1e-6
bos_token_id = 0
eos_token_id = 1
[data]
train = ["data.npy"]
[layout]
dp_shard = {WORLD}
[checkpoint]
every_steps = 10
"""


def write_data(folder: Path) -> None:
    """Write the run's tokens: each depends on the one before, so that there is something to learn."""
    data = 2 + np.cumsum(np.random.default_rng(0).integers(1, 4, 5000)) % (VOCABULARY - 2)
    np.save(folder / "data.npy", data.astype(np.uint16))


def begin(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start the run in a new folder."""
    folder.mkdir()
    write_data(folder)
    (folder / "run.toml").write_text(RUN.format(tokens=steps * ROWS * CONTEXT))
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    words += [f"--max-restarts={RESTARTS}", "--no-python", sys.executable, "-m", "torchwright", "train"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *words, str(folder / "run.toml"), "--quiet"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def kill_at_random(
    agent: subprocess.Popen[bytes], kills: int, mean_s: float, draw: random.Random
) -> list[str]:
    """Kill until so many kills are done or the run ends; return the time and the size of each."""
    done, begun = list[str](), time.monotonic()
    while len(done) < kills:
        try:
            agent.wait(draw.uniform(0, 2 * mean_s))
            return done
        except subprocess.TimeoutExpired:
            victims = (
                draw.sample(there, min(len(there), draw.choice((1, 2))))
                if (there := children(agent.pid))
                else []
            )
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        if victims:
            done.append(f"{time.monotonic() - begun:.0f} s: {len(victims)}")
    return done


def left(folder: Path) -> tuple[dict[int, float], str]:
    """Return losses by step, and a digest of the last checkpoint's tensors."""
    figures = read_figures(folder / "out")
    losses = {step: line["loss"] for step, line in figures.items() if "loss" in line}
    digest = hashlib.sha256()
    for file in sorted(whole(folder / "out" / FOLDER)[-1].glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):  # their order in the file says nothing
            digest.update(f"{file.name} {name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return losses, digest.hexdigest()


def main() -> int:
    kills = run.Option(type=int, default=8, choices=range(1, RESTARTS + 1), metavar="1…20")
    seed = run.Option(type=int, help="of the kills; another each time without it")
    options = run.options(__doc__, kills=kills, steps=300, seed=seed)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    rows = run.Rows(options.json)
    with tempfile.TemporaryDirectory() as scratch:
        quiet, disturbed = Path(scratch) / "undisturbed", Path(scratch) / "killed"
        running: list[subprocess.Popen[bytes]] = []
        try:
            begun = time.monotonic()
            running.append(begin(quiet, options.steps))
            if running[-1].wait():
                raise SystemExit((quiet / "log").read_text())
            alone = time.monotonic() - begun
            begun, at = time.monotonic(), time.time()
            running.append(begin(disturbed, options.steps))
            kills = kill_at_random(running[-1], options.kills, alone / options.kills, random.Random(seed))
            code = running[-1].wait()
            wall = time.monotonic() - begun
            clocks = at, at + wall
        finally:
            for agent in running:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)
        if code:
            raise SystemExit((disturbed / "log").read_text())
        row = judged(quiet, disturbed, options.steps, clocks)
    row |= {"seed": seed, "kills": kills, "undisturbed_s": alone}
    rows.add(row, "\n".join(f"{name:<24}{value}" for name, value in row.items()))
    return 0 if row["losses_equal"] and row["checkpoint_equal"] and row["every_second"] else 1


def judged(quiet: Path, disturbed: Path, steps: int, clocks: tuple[float, float]) -> Row:
    """Compare the two runs, and account for the disturbed one's time; `clocks` are its begin and end.

    Before the ledger torchrun starts, and after the ledger all processes leave.
    """
    (losses, state), (same, other_state) = left(quiet), left(disturbed)
    account = read_account(disturbed / "out")
    seconds = account.seconds()
    before, behind = account.start / 1e9 - clocks[0], clocks[1] - account.end / 1e9
    return {
        "steps": len(same),
        "starts": len(account.attempts),
        "losses_equal": losses == same and len(same) == steps,
        "checkpoint_equal": state == other_state,
        "every_second": abs(sum(seconds.values()) - account.wall) < 1e-3 * account.wall and before < 1,
        "ledger_s": {name: round(value, 1) for name, value in seconds.items()},
        "ledger_wall_s": account.wall,
        "stopwatch_s": clocks[1] - clocks[0],
        "before_the_ledger_s": before,
        "behind_the_ledger_s": behind,
        "notes": account.notes,
    }


if __name__ == "__main__":
    sys.exit(main())
