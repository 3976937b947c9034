"""`torchwright train`: the run from its file to the trained model, alone or under torchrun."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from torchwright.errors import TorchwrightError
from torchwright.train import checkpoint
from torchwright.train.checkpoint import CheckpointError
from torchwright.train.config import read_run
from torchwright.train.ledger import Ledger, process_started
from torchwright.train.loop_setup import Place, check_alike, on_first, processes
from torchwright.train.loop_trainer import MODEL, Outcome, Trainer, TrainingStopped
from torchwright.train.stuck.watch import Watch

STUCK = "stuck"
"""The part of a run folder that holds what the processes recorded before they got stuck."""


def train(path: Path, *, resume: bool = False, live: bool = True) -> Outcome:
    """Train what a run file describes; `resume` continues from its last checkpoint, bit for bit.

    Raises children of `TorchwrightError` for what a user can mend; nothing that was there is overwritten then.
    """
    run = read_run(path)
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    out = path.parent / run.out
    with processes(run.timeout_s) as place:
        check_alike(run)
        run.parallel.check_processes(place.world)
        on_first(lambda: _check_folder(out, resume))
        with Ledger(out, rank=place.rank, world=place.world, started=process_started()) as ledger:
            with ledger.phase("start"):
                trainer = Trainer(run, path.parent, out, place, ledger, live=live)
                if resume:
                    trainer.resume()
            if place.world == 1:
                return trainer.go(lambda: None)
            return _watched(trainer, place, out / STUCK, run.timeout_s)


def _watched(trainer: Trainer, place: Place, folder: Path, timeout_s: float) -> Outcome:
    """Train while every process watches for one that is stuck or gone; then the first says which and where."""
    stopped = None
    try:
        # A collective that hangs ends by itself after the time-out; what hangs elsewhere is noticed a little later.
        with Watch(folder, rank=place.rank, world=place.world, silence=1.5 * timeout_s) as watch:
            try:
                return trainer.go(watch.beat)
            except TorchwrightError as error:  # on all processes alike: nobody is stuck
                stopped = error
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise TrainingStopped(
            "the processes lost each other",
            found=str(error).splitlines()[0],
            next=f"`torchwright why-stuck {folder}` says why; `--resume` continues from the last checkpoint",
        ) from error
    assert stopped is not None
    raise stopped


def _check_folder(out: Path, resume: bool) -> None:
    there = checkpoint.whole(out / checkpoint.FOLDER)
    if resume and not there:
        raise CheckpointError(
            f"--resume: there is no checkpoint in {out / checkpoint.FOLDER}",
            next="leave --resume out to start anew",
        )
    if not resume and (there or (out / MODEL).exists()):
        raise CheckpointError(
            f"the run folder {out} holds a run already",
            found=str(there[-1] if there else out / MODEL),
            next="continue it with --resume, or set another `out` in the run file",
        )
    out.mkdir(parents=True, exist_ok=True)
