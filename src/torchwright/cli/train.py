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
@click.option("--resume", is_flag=True, help="Continue from the run's last checkpoint, bit for bit.")
@quiet_option
@json_option
def command(run: Path, resume: bool, quiet: bool, as_json: bool) -> int:
    """Train a language model.

    The run file says what is trained, and how; docs/train.md has one to begin with. SIGTERM and Ctrl-C save a
    checkpoint and leave. `--resume` goes on from there. Under torchrun every process runs this command:
    `torchrun --nproc-per-node 4 --no-python torchwright train RUN.toml`.
    """
    with importing():
        from torchwright.train.run.loop import train

    outcome = train(run, resume=resume, live=not quiet)
    if int(os.environ.get("RANK", "0")) == 0:
        title = "Trained" if outcome.model else "Saved, and left as asked; continue with --resume"
        print_result(title, dataclasses.asdict(outcome), as_json)
    return 0 if outcome.signal is None else SIGNALLED + outcome.signal
