"""`torchwright report`: where the page lies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from torchwright.process.interrupts import importing


@click.command("report")
@click.argument("directory", metavar="DIR")
def command(directory: str) -> None:
    """Print the path of report.html; open it on a screen."""
    with importing():
        from torchwright import api

    path = Path(api.report_path(directory)).resolve()
    click.echo(path)
    if sys.stdout.isatty() and (
        sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    ):
        click.launch(path.as_uri())
