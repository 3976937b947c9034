"""The run's folder: one run at a time holds it, and a start begins it, goes on with it or moves it aside."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from torchwright.core.process.files import open_own, replacing
from torchwright.core.process.folders import try_lock
from torchwright.hub.run_folder import MODEL
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.runtime import checkpoint
from torchwright.train.run.runtime.checkpoint import CheckpointError

LOCK, RUN_FILE = "lock", "run.toml"


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A run folder that a start has taken, and what it was before."""

    there: bool
    """True if there is a checkpoint to go on from."""
    before: frozenset[str] | None
    """The names of what lay in it; None if the folder was new."""
    aside: Path | None
    """Folder to which an earlier run was moved."""


def begin(out: Path, held: contextlib.ExitStack, *, fresh: bool, resume: bool) -> Begun:
    """Make or take the run folder for as long as `held` lasts.

    `fresh` moves what an earlier run left aside; `resume` insists on a checkpoint. Raises `CheckpointError` for a
    folder that this start must not touch, and `RunError` while another run holds it.
    """
    aside = _move_aside(out) if fresh else None
    there = checkpoint.whole(out / checkpoint.FOLDER)
    if resume and not there:
        raise CheckpointError(
            f"--resume: there is no checkpoint in {out / checkpoint.FOLDER}",
            next="leave --resume out to start anew",
        )
    if not there and (out / MODEL).exists():
        raise CheckpointError(
            f"the run folder {out} holds a trained model and no checkpoint to go on from",
            found=str(out / MODEL),
            next="move it aside with --fresh, or set another `out` in the run file",
        )
    before = frozenset(path.name for path in out.iterdir()) if out.is_dir() else None
    out.mkdir(parents=True, exist_ok=True)
    hold(out, held)
    return Begun(there=bool(checkpoint.whole(out / checkpoint.FOLDER)), before=before, aside=aside)


def undo(out: Path, begun: Begun) -> None:
    """Leave the folder as it was before a start that was refused."""
    for path in out.iterdir() if out.is_dir() else ():
        if path.name in (begun.before or ()):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if begun.before is None:
        with contextlib.suppress(OSError):  # another process still writes into it
            out.rmdir()
            if begun.aside is not None:
                begun.aside.rename(out)


def hold(out: Path, held: contextlib.ExitStack) -> None:
    """Lock the folder until `held` or this process ends, however it ends; raises `RunError` where another has it."""
    lock = open_own(out / LOCK, os.O_RDWR, 0o644)
    held.callback(os.close, lock)
    if try_lock(lock) is False:
        raise RunError(
            f"another run is at work in {out}",
            next="wait for it or stop it, or set another `out` in the run file",
        )


def at_work(out: Path) -> bool:
    """Check whether a run holds the folder now; False where the system cannot say."""
    with contextlib.suppress(OSError):
        lock = os.open(out / LOCK, os.O_RDWR)
        try:
            return try_lock(lock) is False
        finally:
            os.close(lock)
    return False


def write_run_file(out: Path, text: str) -> None:
    """RUN/run.toml, by which the run goes on without the words that made it."""
    with replacing(out / RUN_FILE) as new:
        new.write_text(text, encoding="utf-8")


def _move_aside(out: Path) -> Path | None:
    """Rename the folder to the first free name `OUT.1`, `OUT.2`, … and return it; None where there is nothing."""
    out = out.resolve()
    if not out.is_dir() or not any(out.iterdir()):
        return None
    with contextlib.ExitStack() as held:
        hold(out, held)
        number = 1
        while (aside := out.with_name(f"{out.name}.{number}")).exists():
            number += 1
        out.rename(aside)
    return aside
