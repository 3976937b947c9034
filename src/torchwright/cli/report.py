"""`torchwright report`: where the page lies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from torchwright.cli.options import all_option
from torchwright.cli.printing import console
from torchwright.process.interrupts import importing


@click.command("report")
@click.argument("directory", metavar="DIR")
@all_option
def command(directory: str, every: bool) -> None:
    """Print the path of report.html; open it on a screen.

    With --all the waterfall is printed instead.
    """
    with importing():
        from torchwright import api

    if every:
        from torchwright.artifact.folder import open_artifact
        from torchwright.report.terminal import waterfall

        recipe, _ = open_artifact(Path(directory))
        console().print(waterfall(recipe, artifact=directory, every=True))
        return
    path = Path(api.report_path(directory)).resolve()
    click.echo(path)
    if sys.stdout.isatty() and (
        sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    ):
        click.launch(path.as_uri())
