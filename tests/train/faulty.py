"""A process of a training run, in which something may go wrong; `runs.run_processes` starts one for each rank.

The fault happens in its step FROM or the checkpoint after it. What the process says goes to the file
RUN.toml.PROCESS.err.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchwright.cli.failures import exit_code
from torchwright.train.data.shards import DataError
from torchwright.train.kinds import kind_of, verb
from torchwright.train.run.loop import trainer
from torchwright.train.run.objectives import learner, setup
from torchwright.train.run.runtime import checkpoint, corpus

FROM, SLOW = 4, 6.0
gradients = learner.gradients


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def break_digest() -> None:
    """End the process when its tensors are written, and the checkpoint is not yet whole."""
    written = checkpoint.DigestWriter._written

    def dying(self: checkpoint.DigestWriter, *plans: Any) -> Any:
        written(self, *plans)
        die()

    checkpoint.DigestWriter._written = dying


def break_rename() -> None:
    checkpoint._sync = die


def fill_disk() -> None:
    """No file may grow beyond what the metrics take: the system says that to any write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def count_tokens(path: Path, place: int) -> None:
    """Write down each id that the process reads: in RUN.toml.PROCESS.ids, int64."""
    prepare = setup.Batches.prepare

    def counted(*args: Any) -> Any:
        batch = prepare(*args)
        with Path(f"{path}.{place}.ids").open("ab") as file:
            file.write(batch.ids_BT.contiguous().numpy().tobytes())
        return batch

    setup.Batches.prepare = counted


def no_number(model: Any) -> None:
    """A layer gives no number for the second row of every micro-batch."""

    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        return output.index_fill(0, torch.tensor([1]), math.nan)

    model.layers[1].mlp.down.register_forward_hook(spoil)


def wrong_data() -> None:
    raise DataError("the shard b.npy cannot be read on this machine")


FAULTS = {
    "none": lambda: None,
    "step": die,
    "writing": break_digest,
    "renaming": break_rename,
    "full": fill_disk,
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "data": wrong_data,
    "slow": lambda: None,
    "number": lambda: None,
}


def slowly(work: Any) -> Any:
    """`work`, on the first process longer than any collective of the run may take (`timeout_s`)."""

    def slow(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == 0:
            time.sleep(SLOW)
        return work(*args, **options)

    return slow


class FaultyStep:
    """Counts steps; the fault begins when the gradients of step FROM are there and the optimizer has not moved."""

    def __init__(self, fault: str, checkpoints: Path) -> None:
        self.fault, self.checkpoints, self.count = fault, checkpoints, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.fault == "number" and self.count + 1 == FROM:
            no_number(args[0])
        figures = gradients(*args, **options)
        self.count += 1
        if self.count == FROM:
            # The checkpoint before is written in the background: what is tested is what comes after it.
            while not checkpoint.whole(self.checkpoints):
                time.sleep(0.01)
            FAULTS[self.fault]()
        return figures


def one_process(path: Path, place: int, fault: str, resume: bool) -> int:
    count_tokens(path, place)
    if fault == "slow":
        corpus.verify_shards = slowly(corpus.verify_shards)
        trainer.save_folder = slowly(trainer.save_folder)
    learner.gradients = FaultyStep(fault, path.parent / "out" / checkpoint.FOLDER)

    def run(words: list[str]) -> int:
        outcome = verb(kind_of(path), "train")(path, resume=resume, live=False)
        return 0 if outcome.signal is None else 128 + outcome.signal

    return exit_code(run, [])


def start(path: Path, place: int, environment: dict[str, str], fault: str, resume: bool) -> None:
    """Be the process `place` of a run, as its caller would have started it; end with its exit code."""
    warnings.simplefilter("error")
    file = os.open(f"{path}.{place}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # as OMP_NUM_THREADS says, which the server has read as it started
    sys.exit(one_process(path, place, fault, resume))
