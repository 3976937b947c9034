"""`torchwright doctor`: what this machine can run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from torchwright.cli.options import json_option
from torchwright.cli.printing import console, print_json, say
from torchwright.core.process.interrupts import importing


@click.command("doctor")
@click.option(
    "--refresh", is_flag=True, help="Measure the ceilings again instead of reading the cached ones."
)
@click.option(
    "--build", "only_build", is_flag=True, help="Only compile the kernels, ahead of their first use."
)
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="With --build: also put the kernels of all instruction sets there, for a machine or an image without a "
    "compiler whose TORCHWRIGHT_KERNELS names it.",
)
@json_option
def command(refresh: bool, only_build: bool, into: Path | None, as_json: bool) -> None:
    """Say what this machine can run, how fast, and why not.

    The kernels are compiled where that was not done yet: only this shows whether they can be.
    """
    if refresh and only_build:
        raise click.UsageError("--build measures nothing that --refresh could measure again")
    if into is not None and not only_build:
        raise click.UsageError("--into belongs to --build")
    with importing():
        from torchwright.hardware.kernels.cpu import build
        from torchwright.optimization import doctor

    build.forget()
    if only_build:
        kernels = doctor.build_kernels(into)
        print_json({"kernels": kernels}) if as_json else say(kernels)
        return
    diagnosis = doctor.diagnose(refresh=refresh)
    if as_json:
        print_json(dataclasses.asdict(diagnosis))
    else:
        console().print(doctor.render(diagnosis))
