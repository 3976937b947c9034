"""`torchwright why-stuck`: which rank, which collective, which line."""

from __future__ import annotations

from pathlib import Path

import click

from torchwright.cli.options import json_option
from torchwright.cli.printing import console, print_json


@click.command("why-stuck")
@click.argument("dump_dir", metavar="DUMP_DIR", type=click.Path(path_type=Path))
@click.option("--trust", is_flag=True, help="Read pickled dumps too (plain data alone, nothing is called).")
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="A rank that others waited for less long than this is not called late.",
)
@json_option
def command(dump_dir: Path, trust: bool, patience: float, as_json: bool) -> None:
    """Say why a distributed job hangs, from its flight-recorder dumps.

    DUMP_DIR holds a dump of each rank, of NCCL or gloo: those that `torchwright train` writes, or PyTorch's own.
    """
    from torchwright.train.hang import show
    from torchwright.train.hang.analyse import analyse
    from torchwright.train.hang.read import read_dumps

    dumps, notes = read_dumps(dump_dir, trust=trust)
    finding = analyse(dumps, patience=patience)
    if as_json:
        print_json(show.plain(finding, notes))
    else:
        console().print(show.evidence(finding, notes))
