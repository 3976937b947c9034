"""Runs of two processes on each launcher of deploy/ and examples/monarch, killed three times, against one undisturbed.

    python -m benchmarks.train.restarts [--launchers torchrun slurm jobset ray monarch random] [--kills 8] [--seed N]
        [--json FILE]

The kills come at given steps, whatever the run is doing then: a process of the training twice, and once, where the
launcher has a node of its own (Slurm, JobSet), that node with all its processes. Nothing is done by hand. Losses and
the trained model must be bitwise those of the run without a kill, and the time report must have every second. A restart
may do at most the steps of two checkpoints again. Otherwise the exit code is 1.

`random` is torchrun with four processes (`dp_shard = 4`), of which one or two get SIGKILL at random times, whatever the
run is doing then: starting, meeting, stepping, writing a checkpoint. Their mean spreads --kills over the run.

Monarch wants `torchmonarch`, Ray Train `ray[train]`; a launcher that is not installed is left out and named.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.harness import run
from benchmarks.harness.run import ROOT, Row, children
from torchwright.train.ledger import read_account
from torchwright.train.run.observe.metrics import read_figures

LAUNCHERS = ("torchrun", "slurm", "jobset", "ray", "monarch", "random")
RANDOM = "random"
WORLD, RANDOM_WORLD, EVERY = 2, 4, 10
STEPS, RANDOM_STEPS = 100, 300
RESTARTS = 20
KILLS = (24, 47, 78)
"""Steps at which a kill is due: between checkpoints, and none in the first ones, which every launcher reaches alike."""
HERE = ROOT / "examples" / "monarch"
LIMIT_S = 900
NODE = ("slurm", "jobset")
PACKAGES = {"monarch": "monarch", "ray": "ray"}
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
{{axis}} = {{world}}
[checkpoint]
every_steps = {EVERY}
"""


def write_data(folder: Path) -> None:
    """Write the run's tokens: each depends on the one before, so that there is something to learn."""
    data = 2 + np.cumsum(np.random.default_rng(0).integers(1, 4, 5000)) % (VOCABULARY - 2)
    np.save(folder / "data.npy", data.astype(np.uint16))


def command(launcher: str, run_file: Path, folder: Path) -> list[str]:
    """Return the command that starts a run and starts it again."""
    python, file = sys.executable, str(run_file)
    match launcher:
        case "torchrun" | "random":
            world = RANDOM_WORLD if launcher == RANDOM else WORLD
            words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
            words += [f"--max-restarts={RESTARTS}", "--no-python", "torchwright", "train"]
            return [python, *words, file, "--quiet"]
        case "slurm" | "jobset":
            return [python, str(HERE / "cluster_here.py"), launcher, file, "--nodes", str(WORLD)]
        case "ray":
            words = ["--processes", str(WORLD), "--storage", str(folder / "ray")]
            return [python, str(HERE / "ray_train.py"), file, *words]
        case _:
            return [python, str(HERE / "train_actors.py"), file, "--processes", str(WORLD)]


def begin(launcher: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the run in a new folder."""
    folder.mkdir()
    write_data(folder)
    steps, axis, world = STEPS, "dp_replicate", WORLD
    if launcher == RANDOM:
        steps, axis, world = RANDOM_STEPS, "dp_shard", RANDOM_WORLD
    text = RUN.format(tokens=steps * ROWS * CONTEXT, axis=axis, world=world)
    (folder / "run.toml").write_text(text)
    commands = folder / "bin"
    commands.mkdir()
    for name, module in (("torchwright", "torchwright"), ("torchrun", "torch.distributed.run")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (commands / name).chmod(0o755)
    path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command(launcher, folder / "run.toml", folder),
            env=environment,
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )


def processes(out: Path) -> dict[int, tuple[int, int | None]]:
    """Rank → (process, the launcher that started it) of the newest attempt, by the ledgers' first lines."""
    found: dict[int, tuple[int, tuple[int, int | None]]] = {}
    for path in (out / "ledger").glob("rank*.jsonl"):
        with path.open() as file:
            first: dict[str, Any] = json.loads(file.readline() or "{}")
        if first:
            pids = first["pid"], (first.get("launcher") or {}).get("pid")
            found[first["rank"]] = max(found.get(first["rank"], (0, (0, None))), (first["wall"], pids))
    return {rank: pids for rank, (_, pids) in found.items()}


def kill(launcher: str, out: Path, number: int) -> str:
    """Kill a process of the run, or the second time its node; return what was killed."""
    rank = number % WORLD
    process, node = processes(out)[rank]
    if launcher in NODE and number == 1 and node is not None:
        os.kill(node, signal.SIGKILL)
        os.kill(process, signal.SIGKILL)
        return f"node {rank}"
    os.kill(process, signal.SIGKILL)
    return f"rank {rank}"


def disturb(launcher: str, agent: subprocess.Popen[bytes], out: Path) -> list[str]:
    """Kill at each step of `KILLS` and wait for the end; return the kills that were made."""
    done, until = list[str](), time.monotonic() + LIMIT_S
    while agent.poll() is None and time.monotonic() < until:
        due = KILLS[len(done)] if len(done) < len(KILLS) else None
        if due is not None and max(read_figures(out), default=0) >= due:
            done.append(f"{kill(launcher, out, len(done))} at step {max(read_figures(out))}")
        time.sleep(0.02)
    return done


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
            there = children(agent.pid)
            victims = draw.sample(there, min(len(there), draw.choice((1, 2))))
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        if victims:
            done.append(f"{time.monotonic() - begun:.0f} s: {len(victims)}")
    return done


def model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "model" / "model.safetensors")


def judged(quiet: Path, folder: Path, steps: int) -> Row:
    """Compare a run with the undisturbed one, and take its time report."""
    losses, same = (
        {step: line["loss"] for step, line in read_figures(each / "out").items() if "loss" in line}
        for each in (quiet, folder)
    )
    one, other = model(quiet), model(folder)
    account = read_account(folder / "out")
    seconds = account.seconds()
    again = [before.reached - (after.resumed or 0) for before, after in pairwise(account.attempts)]
    return {
        "attempts": len(account.attempts),
        "losses_equal": losses == same and len(same) == steps,
        "model_equal": one.keys() == other.keys()
        and all(torch.equal(one[name], other[name]) for name in one),
        "every_second": abs(sum(seconds.values()) - account.wall) < 1e-3 * account.wall,
        "steps_done_again": again,
        "recovery_s": round(seconds["recovery"], 1),
        "idle_between_s": round(account.between, 1),
        "lost_work_s": round(seconds["lost_work"], 2),
        "wall_s": round(account.wall, 1),
    }


def undisturbed(launcher: str, folder: Path) -> float:
    """Run on a launcher without a kill; return the seconds."""
    begun = time.monotonic()
    agent = begin(launcher, folder)
    if agent.wait():
        raise SystemExit((folder / "log").read_text())
    return time.monotonic() - begun


def one(
    launcher: str, quiet: Path, folder: Path, kill: Callable[[subprocess.Popen[bytes]], list[str]]
) -> Row:
    """Run on one launcher, killed by `kill`."""
    agent = begin(launcher, folder)
    try:
        kills = kill(agent)
        if launcher == RANDOM:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(LIMIT_S)
        if agent.poll() is None:
            raise SystemExit(
                f"{launcher} takes more than {LIMIT_S} s\n{(folder / 'log').read_text()[-4000:]}"
            )
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
    if agent.returncode:
        raise SystemExit(f"{launcher}: exit code {agent.returncode}\n{(folder / 'log').read_text()[-4000:]}")
    steps = RANDOM_STEPS if launcher == RANDOM else STEPS
    return {"launcher": launcher, "kills": kills} | judged(quiet, folder, steps)


def held(row: Row) -> bool:
    """Check whether a row keeps the promises of the run."""
    if not (row["losses_equal"] and row["model_equal"] and row["every_second"]):
        return False
    if row["launcher"] == RANDOM:
        return len(row["kills"]) > 0
    return len(row["kills"]) == len(KILLS) and max(row["steps_done_again"]) <= 2 * EVERY


def main() -> int:
    kills = run.Option(type=int, default=8, choices=range(1, RESTARTS + 1), metavar=f"1…{RESTARTS}")
    seed = run.Option(type=int, default=random.randrange(10**6), help="of random kills; another each time")
    options = run.options(__doc__, launchers=LAUNCHERS, kills=kills, seed=seed)
    rows, good = run.Rows(options.json, note=f"random kills by seed {options.seed}"), True
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        quiet = {launcher: Path(scratch) / f"{launcher}-undisturbed" for launcher in ("torchrun", RANDOM)}
        alone = {launcher: undisturbed(launcher, folder) for launcher, folder in quiet.items()}
        for launcher in options.launchers:
            if launcher in PACKAGES and find_spec(PACKAGES[launcher]) is None:
                print(f"{launcher}: not installed, left out")
                continue
            folder = Path(scratch) / launcher
            kill = partial(disturb, launcher, out=folder / "out")
            if launcher == RANDOM:
                mean = alone[RANDOM] / options.kills
                kill = partial(kill_at_random, kills=options.kills, mean_s=mean, draw=draw)
            row = one(launcher, quiet.get(launcher, quiet["torchrun"]), folder, kill)
            good &= held(row)
            rows.add(row, "\n".join(f"{name:<20}{value}" for name, value in row.items()) + "\n")
            shutil.rmtree(folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
