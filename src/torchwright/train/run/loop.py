"""`torchwright train`: the run from its file to the trained model, alone or under torchrun."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from torchwright.ledger import Ledger, process_started
from torchwright.stuck.watch import Beat, Watch
from torchwright.train.run import checkpoint
from torchwright.train.run.checkpoint import CheckpointError
from torchwright.train.run.config import read_run
from torchwright.train.run.patience import patient
from torchwright.train.run.setup import Place, check_alike, on_first, processes
from torchwright.train.run.trainer import MODEL, Trainer, TrainingOutcome, TrainingStopped

STUCK = "stuck"
"""The part of a run folder that holds what the processes recorded before they got stuck."""


def train(path: Path, *, resume: bool = False, live: bool = True) -> TrainingOutcome:
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
        launch = on_first(lambda: _begin(out, resume))
        with Ledger(
            out, rank=place.rank, world=place.world, launch=launch, started=process_started()
        ) as ledger:

            def whole_run(beat: Beat) -> TrainingOutcome:
                with ledger.phase("start"), patient(run.timeout_s):
                    trainer = Trainer(run, path.parent, out, place, ledger, live=live)
                    if resume:
                        trainer.resume()
                return trainer.go(beat)

            if place.world == 1:
                return whole_run(lambda patience=0.0: None)
            return _watched(whole_run, place, out / STUCK, run.timeout_s)


def _watched(
    whole_run: Callable[[Beat], TrainingOutcome], place: Place, folder: Path, timeout_s: float
) -> TrainingOutcome:
    """Train while every process watches for one that is stuck or gone; then the first says which and where."""
    try:
        # A collective that hangs ends by itself after the time-out; what hangs elsewhere is noticed a little later.
        with Watch(folder, rank=place.rank, world=place.world, silence=1.5 * timeout_s) as watch:
            watch.beat(math.inf)
            return whole_run(watch.beat)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise TrainingStopped(
            "the processes lost each other",
            found=str(error).splitlines()[0],
            next=f"`torchwright why-stuck {folder}` says why; `--resume` continues from the last checkpoint",
        ) from error


def _begin(out: Path, resume: bool) -> str:
    """Make the run folder, unless it holds what this start must not touch; a name that no other start has."""
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
    return secrets.token_hex(8)
