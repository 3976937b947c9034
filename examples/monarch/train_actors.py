"""A training run of Monarch's actors: one program starts them, sees a fault as an error, and starts them again.

    pip install torchmonarch
    python examples/monarch/train_actors.py RUN.toml --processes 2

Each actor is a process that calls `torchwright.train`'s own loop. When one dies, the call raises `SupervisionError` (or
`ActorError`, if another actor notices first that its peer is gone). The program then stops the mesh and spawns a new
one, whose actors go on from the last whole checkpoint: the model is bitwise that of a run without a fault.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

import monarch.actor  # pyright: ignore[reportMissingImports]
from monarch.actor import Actor, current_rank, endpoint, this_host  # pyright: ignore[reportMissingImports]

Failure = RuntimeError
"""Monarch's SupervisionError and ActorError derive from it."""


class Trainer(Actor):
    """One process of the run."""

    def __init__(self, run_file: str, world: int) -> None:
        self.run_file, self.world = Path(run_file), world

    @endpoint
    def address(self) -> tuple[str, int]:
        """Return a host and a free port at which the processes can meet: those of rank 0 are taken."""
        with socket.socket() as free:
            free.bind(("", 0))
            return socket.gethostname() if self.world > 1 else "localhost", free.getsockname()[1]

    @endpoint
    def train(self, host: str, port: int, start: int) -> str:
        """Train from the last checkpoint on; return the folder of the run. `start` counts the attempts from 0."""
        rank = current_rank().rank
        # torch.distributed's own names: every launcher sets them.
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(start),
        }
        from torchwright.train.run.loop.train import train

        return str(train(self.run_file, live=False).out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_file", metavar="RUN.toml")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument(
        "--restarts", type=int, default=10, metavar="N", help="at most; then the error ends it"
    )
    asked = parser.parse_args()
    for start in range(asked.restarts + 1):
        try:
            out = attempt(asked.run_file, asked.processes, start)
        except Failure as failure:
            print(f"attempt {start + 1} failed: {str(failure).strip().splitlines()[-1]}", flush=True)
            continue
        print(f"trained: {out}", flush=True)
        return 0
    print(f"given up after {asked.restarts} restarts", file=sys.stderr)
    return 1


def attempt(run_file: str, processes: int, start: int) -> str:
    """Spawn the actors and train; raises `Failure` if one of them dies or fails."""
    # Without this hook a fault ends this program before the call can raise it.
    monarch.actor.unhandled_fault_hook = lambda failure: None
    mesh: Any = this_host().spawn_procs(per_host={"procs": processes})
    try:
        trainers = mesh.spawn(f"trainer_{secrets.token_hex(4)}", Trainer, run_file, processes)
        host, port = trainers.slice(procs=0).address.call_one().get()
        found = trainers.train.call(host, port, start).get()
        return next(out for _, out in found.items())
    finally:
        stop(mesh)


def stop(mesh: Any) -> None:
    """End the processes that are left; those that are gone cannot answer."""
    try:
        mesh.stop().get(timeout=30)
    except (Failure, TimeoutError):
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
