"""`torchwright doctor`: what this machine can run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from torchwright.cli import operators as scorecard
from torchwright.cli.options import DeviceName, json_option
from torchwright.cli.printing import console, print_json, say
from torchwright.core.process.interrupts import importing


@click.command("doctor")
@click.option(
    "--device",
    type=DeviceName(),
    show_default="a card where one can be used, else cpu",
    help="The device to look at; of one that is not here, say why, and which techniques have kernels for its kind.",
)
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
@click.option(
    "--operators",
    is_flag=True,
    help="Hold the device's operators against the CPU's instead, on the samples of PyTorch's own tests: results, "
    "gradients, layers, optimizers; in child processes, since a driver may crash.",
)
@click.option(
    "--match",
    metavar="REGEX",
    help="With --operators: only those whose name contains this.",
)
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --operators: write the scorecard as an HTML page too.",
)
@json_option
def command(
    device: str | None,
    refresh: bool,
    only_build: bool,
    into: Path | None,
    operators: bool,
    match: str | None,
    page: Path | None,
    as_json: bool,
) -> None:
    """Say what this machine can run, how fast, and why not.

    The kernels are compiled where that was not done yet: only this shows whether they can be.
    """
    if operators:
        if refresh or only_build or into is not None:
            raise click.UsageError("--operators measures and builds nothing: no --refresh, --build or --into")
        scorecard.check(match)
        scorecard.run(device, match, page, as_json)
        return
    if match is not None or page is not None:
        raise click.UsageError("--match and --page belong to --operators")
    if refresh and only_build:
        raise click.UsageError("--build measures nothing that --refresh could measure again")
    if device is not None and only_build:
        raise click.UsageError("--build compiles the kernels of CPUs, whatever --device names")
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
    diagnosis = doctor.diagnose(device, refresh=refresh)
    if as_json:
        print_json(dataclasses.asdict(diagnosis))
    else:
        console().print(doctor.render(diagnosis))
