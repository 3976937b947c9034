"""`torchwright doctor`: what this machine can run."""

from __future__ import annotations

import dataclasses

import click

from torchwright.cli.options import json_option
from torchwright.cli.printing import console, print_json
from torchwright.process.interrupts import importing


@click.command("doctor")
@click.option(
    "--refresh", is_flag=True, help="Measure the ceilings again instead of reading the cached ones."
)
@json_option
def command(refresh: bool, as_json: bool) -> None:
    """What this machine can run, how fast, and why not."""
    with importing():
        from torchwright import doctor

    diagnosis = doctor.diagnose(refresh=refresh)
    if as_json:
        print_json(dataclasses.asdict(diagnosis))
    else:
        console().print(doctor.render(diagnosis))
