"""The recipes of deploy/ for Slurm and for Kubernetes' JobSet, run in processes of this machine.

    python examples/monarch/cluster_here.py slurm RUN.toml --nodes 2
    python examples/monarch/cluster_here.py jobset RUN.toml --nodes 2

Nothing of a cluster is needed. `slurm` runs the batch script with an `srun` and a `scontrol` that are this program.
`jobset` starts the containers' command of the manifest as processes. Both do what the cluster does when a node is lost:
Slurm puts the job back into the queue, and the JobSet controller starts all pods again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MOMENT_S = 1.0
"""Within this time the tasks of one fault end: the one that was killed, and those that lost it."""


def main() -> int:
    if sys.argv[1:2] in (["srun"], ["scontrol"]):  # as the batch script calls them
        return {"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["slurm", "jobset"])
    parser.add_argument("run_file", metavar="RUN.toml", type=Path)
    parser.add_argument("--nodes", type=int, default=2, metavar="N")
    asked = parser.parse_args()
    run = slurm if asked.kind == "slurm" else jobset
    return run(asked.run_file.resolve(), asked.nodes)


# ---------------------------------------------------------------------------------------------------- Slurm


def slurm(run_file: Path, nodes: int, requeues: int = 10) -> int:
    """Run the batch script as Slurm would: again with the same job id where a node was lost."""
    with tempfile.TemporaryDirectory() as scratch:
        commands = Path(scratch)
        for name in ("srun", "scontrol"):
            path = commands / name
            this = shlex.join([sys.executable, str(Path(__file__).resolve()), name])
            path.write_text(f'#!/bin/sh\nexec {this} "$@"\n', encoding="utf-8")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        for restart in range(requeues + 1):
            environment = {
                **os.environ,
                "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
                "SLURM_NNODES": str(nodes),
                "SLURM_JOB_NODELIST": "localhost",
                "SLURM_JOB_ID": str(os.getpid()),
                "SLURM_RESTART_COUNT": str(restart),
                "HERE_REQUEUED": str(commands / "requeued"),
            }
            script = ["bash", str(DEPLOY / "slurm" / "train.sbatch"), str(run_file)]
            code = subprocess.run(script, env=environment, check=False).returncode
            asked = (commands / "requeued").exists()
            (commands / "requeued").unlink(missing_ok=True)
            if not asked:
                return code
            print(f"requeued (restart {restart + 1})", flush=True)
    return code


def srun(words: list[str]) -> int:
    """One task on each node; the first that ends badly ends all."""
    command = words[next(at for at, word in enumerate(words) if not word.startswith("-")) :]
    tasks = [
        subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(node)}, start_new_session=True)
        for node in range(int(os.environ["SLURM_NNODES"]))
    ]
    return _first_bad(tasks)


def scontrol(words: list[str]) -> int:
    if words[0] == "show":
        print("localhost")
    else:
        Path(os.environ["HERE_REQUEUED"]).touch()
    return 0


# --------------------------------------------------------------------------------------------------- JobSet


def jobset(run_file: Path, nodes: int) -> int:
    """Start the manifest's pods as processes; where one is lost, start all again, as often as the manifest says."""
    manifest: Any = yaml.safe_load((DEPLOY / "kubernetes" / "train-jobset.yaml").read_text(encoding="utf-8"))
    (replicated,) = manifest["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    words: list[str] = container["command"]
    for restart in range(manifest["spec"]["failurePolicy"]["maxRestarts"] + 1):
        with socket.socket() as free:  # pods have addresses of their own; processes here share one
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        here = {
            "--nnodes=2": f"--nnodes={nodes}",
            "--rdzv-endpoint=train-node-0-0.train:29400": f"--rdzv-endpoint=localhost:{port}",
            "/runs/RUN.toml": str(run_file),
        }
        missing = here.keys() - set(words)
        assert not missing, f"the manifest's command has no {missing}"
        command = [here.get(word, word) for word in words]
        if not restart:
            print(shlex.join(command), flush=True)
        code = _first_bad([subprocess.Popen(command, start_new_session=True) for _ in range(nodes)])
        if not code:
            return 0
        print(f"a pod failed ({code}); all pods start again (restart {restart + 1})", flush=True)
    return code


def _first_bad(tasks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all; kill the others, with their processes, when one ends badly. Return the highest exit code, as srun.

    That of a task which a signal ended is 128 and the signal's number.
    """
    try:
        while any(task.poll() is None for task in tasks):
            if any(task.returncode for task in tasks):
                time.sleep(MOMENT_S)
                break
            time.sleep(0.05)
        codes = [task.poll() or 0 for task in tasks]
        return max(128 - code if code < 0 else code for code in codes)
    finally:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.pid, signal.SIGKILL)
            task.wait()


if __name__ == "__main__":
    sys.exit(main())
