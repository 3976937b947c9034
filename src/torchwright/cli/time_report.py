"""`torchwright time-report`: where a training job's time went."""

from __future__ import annotations

from pathlib import Path

import click

from torchwright.cli.options import json_option
from torchwright.cli.printing import console, print_json


@click.command("time-report")
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the time line as a page of its own.",
)
@json_option
def command(run_dir: Path, html: Path | None, as_json: bool) -> None:
    """Account for every second of a training job.

    RUN_DIR holds a ledger of each rank and restart. Each second falls into one bucket. The effective training time is
    the share of the seconds whose steps are in the trained weights.
    """
    from torchwright.train.ledger import read_account, show

    account = read_account(run_dir)
    if html is not None:
        from torchwright.train.ledger import timeline

        timeline.write(account, html)
    if as_json:
        print_json(show.plain(account) | ({"html": html} if html is not None else {}))
        return
    screen = console()
    screen.print(show.table(account))
    if html is not None:
        screen.print(f"time line: {html}", style="dim", soft_wrap=True)
