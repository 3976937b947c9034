"""A training run on Ray Train: Ray places the processes, and starts all of them again when one dies.

    pip install 'ray[train]'
    python examples/monarch/ray_train.py RUN.toml --processes 2

Ray makes the process group; the run's own checkpoints are the ones that it goes on from, so Ray is given none.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
from ray.train.torch import TorchConfig, TorchTrainer  # pyright: ignore[reportMissingImports]


def worker(asked: dict[str, Any]) -> None:
    """Train in one process; torch.distributed is ready."""
    from torchwright.train.run.loop.train import train

    os.chdir(asked["folder"])
    train(Path(asked["run_file"]), live=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_file", metavar="RUN.toml")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument(
        "--restarts", type=int, default=10, metavar="N", help="at most; then the error ends it"
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="a cluster's; without one Ray starts on this machine"
    )
    parser.add_argument(
        "--storage",
        metavar="DIR",
        default="~/ray_results",
        help="Ray's own notes, on a disk that all nodes see",
    )
    asked = parser.parse_args()
    # The loop runs in a thread of Ray's process: Ray asks it to leave, not a signal.
    variables = {name: os.environ[name] for name in ("PYTHONPATH", "TORCHWRIGHT_CACHE") if name in os.environ}
    # "local": never a cluster of another program on this machine.
    ray.init(address=asked.address or "local", runtime_env={"env_vars": variables}, include_dashboard=False)
    trainer = TorchTrainer(
        worker,
        train_loop_config={"run_file": str(Path(asked.run_file).resolve()), "folder": os.getcwd()},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=asked.processes, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            storage_path=str(Path(asked.storage).expanduser().resolve()),
            failure_config=FailureConfig(max_failures=asked.restarts),
        ),
    )
    trainer.fit()
    print("trained", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
