"""`torchwright train`: the run from its file to the trained model, alone or under torchrun."""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchwright.core.errors import TorchwrightError
from torchwright.train.hang.watch import Beat, Watch
from torchwright.train.ledger import Ledger, process_started, torchrun
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.read import read_run, with_merge
from torchwright.train.run.config.run import AnyRun, Run
from torchwright.train.run.loop.session import Outcome, RunSession, TrainingStopped
from torchwright.train.run.loop.trainer import Trainer, TrainingOutcome
from torchwright.train.run.observe.page import write_last
from torchwright.train.run.observe.wandb_run import check_wandb
from torchwright.train.run.runtime.corpus import TOKENS
from torchwright.train.run.runtime.deterministic import deterministic
from torchwright.train.run.runtime.folder import begin, undo, write_run_file
from torchwright.train.run.runtime.patience import patient
from torchwright.train.run.runtime.processes import ProcessRank, check_alike, on_first, processes

STUCK = "stuck"
"""The part of a run folder that holds what the processes recorded before they got stuck."""


def train(
    path: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    merge: bool = False,
    fresh: bool = False,
    resume: bool = False,
    live: bool = True,
    profile: range = range(0),
    trust: bool = False,
) -> TrainingOutcome:
    """Train what a run file describes, from its last checkpoint on if there is one, bit for bit.

    `settings` are fields by their dotted names, which win over those of the file. `fresh` moves an earlier run aside
    and begins anew; `resume` insists on a checkpoint; `merge` writes the model with
    its adapters in it, also of a run that is at its end. The steps of `profile` are made under torch's profiler;
    `trust` takes compiled code that another user's run left in the folder.

    Raises children of `TorchwrightError` for what a user can mend; nothing that was there is overwritten then.
    """
    run = read_run(path, settings)
    if merge:
        run = with_merge(run)
    # A run file in the run's own folder is moved aside with it, and is wanted in the new one.
    inside = (path.parent / run.out).resolve() == path.parent.resolve()
    text = path.read_text(encoding="utf-8") if inside else None
    return train_run(
        run, path.parent, text=text, fresh=fresh, resume=resume, live=live, profile=profile, trust=trust
    )


def train_run(run: Run, folder: Path, **how: Any) -> TrainingOutcome:
    """Train as `train` does, with paths relative to `folder`; `how` is what `in_session` takes besides."""
    return in_session(Trainer, run, folder, **how)


def refuse(kind: str, **asked: bool) -> None:
    """Raise `RunError` for options that runs of a kind do not have."""
    for name, given in asked.items():
        if given:
            raise RunError(f"--{name} is for language models", found=kind, next=f"leave --{name} out")


def in_session(
    kind: Callable[..., RunSession[AnyRun, Outcome]],
    run: AnyRun,
    folder: Path,
    *,
    text: str | None = None,
    fresh: bool = False,
    resume: bool = False,
    live: bool = True,
    profile: range = range(0),
    trust: bool = False,
    tokens: Path | None = None,
) -> Outcome:
    """Train a run of any kind; `kind(run, folder, out, place, ledger, live=…)` is its session.

    Writes `text` to RUN/run.toml once the run has begun. `tokens` is a folder of its shards, which becomes RUN/tokens
    if that is missing.
    """
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    check_wandb(run.wandb)
    out = folder / run.out
    with processes(run.timeout_s) as place, contextlib.ExitStack() as held:
        held.enter_context(deterministic(run, place.device))
        check_alike(run)
        run.check_processes(place.world)
        # A name that no other start has, and what the folder was.
        # What was begun anew before a failure is not moved aside.
        anew = fresh and not place.again
        launch, begun = on_first(lambda: (secrets.token_hex(8), begin(out, held, fresh=anew, resume=resume)))
        if tokens is not None:
            on_first(partial(_adopt, tokens, out / TOKENS))
        ledger = Ledger(
            out,
            rank=place.rank,
            world=place.world,
            launch=launch,
            started=process_started(),
            launcher=torchrun(),
        )
        started = threading.Event()
        if place.first:
            # Called once the ledger is closed, so that the page has the whole account.
            held.callback(lambda: write_last(out) if started.is_set() else None)

        def whole_run(beat: Beat) -> Outcome:
            with ledger.phase("start"), patient(run.timeout_s):
                more = {"trust": True} if trust else {}
                session = kind(run, folder, out, place, ledger, live=live, profile=profile, **more)
                if begun.there:
                    session.resume()
                if text is not None:
                    on_first(partial(write_run_file, out, text))
            started.set()
            return session.go(beat)

        try:
            with ledger:
                if place.world == 1:
                    return whole_run(lambda patience=0.0: None)
                return _watched(whole_run, place, out / STUCK, run.timeout_s)
        except TorchwrightError as error:
            # A start that is refused leaves neither a folder nor an attempt.
            if not started.is_set() and not isinstance(error, TrainingStopped):
                ledger.path.unlink(missing_ok=True)
                if place.first:
                    undo(out, begun)
            raise


def _adopt(tokens: Path, kept: Path) -> None:
    """Take the shards that were made to count the data."""
    if tokens.is_dir() and not kept.exists():
        tokens.rename(kept)


def _watched(
    whole_run: Callable[[Beat], Outcome], place: ProcessRank, folder: Path, timeout_s: float
) -> Outcome:
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
            next=f"`torchwright why-stuck {folder}` says why; the same command continues from the last checkpoint",
        ) from error
