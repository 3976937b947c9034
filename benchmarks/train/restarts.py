"""Runs of two processes on each launcher of deploy/ and examples/monarch, killed three times, against one undisturbed.

    python -m benchmarks.train.restarts [--launchers torchrun slurm jobset ray monarch] [--json FILE]

The kills come at given steps, whatever the run is doing then: a process of the training twice, and once, where the
launcher has a node of its own (Slurm, JobSet), that node with all its processes. Nothing is done by hand. Losses and
the trained model must be bitwise those of the run without a kill, and the time report must have every second. A restart
may do at most the steps of two checkpoints again. Otherwise the exit code is 1.

Monarch wants `torchmonarch`, Ray Train `ray[train]`; a launcher that is not installed is left out and named.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.harness import run
from benchmarks.harness.run import ROOT, Row
from benchmarks.train.random_kills import RUN, write_data
from torchwright.train.ledger import read_account
from torchwright.train.run.observe.metrics import read_figures

WORLD, EVERY = 2, 10
STEPS = 100
KILLS = (24, 47, 78)
"""Steps at which a kill is due: between checkpoints, and none in the first ones, which every launcher reaches alike."""
HERE = ROOT / "examples" / "monarch"
LIMIT_S = 900
NODE = ("slurm", "jobset")
PACKAGES = {"monarch": "monarch", "ray": "ray"}


def command(launcher: str, run_file: Path, folder: Path) -> list[str]:
    """Return the command that starts a run and starts it again."""
    python, file = sys.executable, str(run_file)
    match launcher:
        case "torchrun":
            words = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={WORLD}",
                "--max-restarts=10",
            ]
            return [python, *words, "--no-python", "torchwright", "train", file]
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
    text = RUN.format(tokens=STEPS * 8 * 32).replace("dp_shard = 4", f"dp_replicate = {WORLD}")
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


def model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "model" / "model.safetensors")


def judged(quiet: Path, folder: Path) -> Row:
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
        "losses_equal": losses == same and len(same) == STEPS,
        "model_equal": one.keys() == other.keys()
        and all(torch.equal(one[name], other[name]) for name in one),
        "every_second": abs(sum(seconds.values()) - account.wall) < 1e-3 * account.wall,
        "steps_done_again": again,
        "recovery_s": round(seconds["recovery"], 1),
        "idle_between_s": round(account.between, 1),
        "lost_work_s": round(seconds["lost_work"], 2),
        "wall_s": round(account.wall, 1),
    }


def one(launcher: str, quiet: Path, folder: Path) -> Row:
    """Run and kill on one launcher."""
    agent = begin(launcher, folder)
    try:
        kills = disturb(launcher, agent, folder / "out")
        if agent.poll() is None:
            raise SystemExit(
                f"{launcher} takes more than {LIMIT_S} s\n{(folder / 'log').read_text()[-4000:]}"
            )
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
    if agent.returncode:
        raise SystemExit(f"{launcher}: exit code {agent.returncode}\n{(folder / 'log').read_text()[-4000:]}")
    return {"launcher": launcher, "kills": kills} | judged(quiet, folder)


def held(row: Row) -> bool:
    """Check whether a row keeps the promises of the run."""
    whole = row["losses_equal"] and row["model_equal"] and row["every_second"]
    return whole and len(row["kills"]) == len(KILLS) and max(row["steps_done_again"]) <= 2 * EVERY


def main() -> int:
    launchers = ("torchrun", "slurm", "jobset", "ray", "monarch")
    options = run.options(__doc__, launchers=launchers)
    rows, good = run.Rows(options.json), True
    with tempfile.TemporaryDirectory() as scratch:
        quiet = Path(scratch) / "undisturbed"
        agent = begin("torchrun", quiet)
        if agent.wait():
            raise SystemExit((quiet / "log").read_text())
        for launcher in options.launchers:
            if launcher in PACKAGES and find_spec(PACKAGES[launcher]) is None:
                print(f"{launcher}: not installed, left out")
                continue
            folder = Path(scratch) / launcher
            row = one(launcher, quiet, folder)
            good &= held(row)
            rows.add(row, "\n".join(f"{name:<20}{value}" for name, value in row.items()) + "\n")
            shutil.rmtree(folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
