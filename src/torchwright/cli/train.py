"""`torchwright train`: a run from its file, alone or under torchrun."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import click

from torchwright.cli.options import json_option, quiet_option
from torchwright.cli.printing import print_result
from torchwright.process.interrupts import importing

SIGNALLED = 128


@click.command("train")
@click.argument("run", metavar="RUN.toml", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--fresh", is_flag=True, help="Move an earlier run in the same folder aside and begin anew.")
@click.option("--resume", is_flag=True, help="Insist on a checkpoint to continue from.")
@quiet_option
@json_option
def command(run: Path, fresh: bool, resume: bool, quiet: bool, as_json: bool) -> int:
    """Train a language model.

    The run file says what is trained, and how; docs/train.md has one to begin with. The same command goes on from the
    last checkpoint of a run that ended before its time, bit for bit; SIGTERM and Ctrl-C save one and leave. Under
    torchrun every process runs this command, and a process that dies has all of them start again:
    `torchrun --nproc-per-node 4 --max-restarts 20 --no-python torchwright train RUN.toml`.
    """
    if fresh and resume:
        raise click.UsageError("--fresh begins anew and --resume goes on: give one of them")
    with importing():
        from torchwright.train.run.loop import train

    outcome = train(run, fresh=fresh, resume=resume, live=not quiet)
    if int(os.environ.get("RANK", "0")) == 0:
        title = "Trained" if outcome.signal is None else "Saved, and left as asked; the same command goes on"
        print_result(title, dataclasses.asdict(outcome), as_json)
    return 0 if outcome.signal is None else SIGNALLED + outcome.signal
