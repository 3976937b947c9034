"""`torchwright report`: where the page lies; that of a training run is written first."""

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

    DIR is an artifact, or the folder of a training run, whose page is written now. With --all an artifact's waterfall
    is printed instead.
    """
    from torchwright.train.run import page

    if page.is_run(Path(directory)):
        if every:
            raise click.UsageError("--all is for artifacts, and DIR is the folder of a training run")
        _show(page.write(Path(directory)))
        return
    with importing():
        from torchwright import api

    if every:
        from torchwright.artifact.folder import open_artifact
        from torchwright.report.terminal import waterfall

        recipe, _ = open_artifact(Path(directory))
        console().print(waterfall(recipe, artifact=directory, every=True))
        return
    _show(Path(api.report_path(directory)))


def _show(path: Path) -> None:
    """Print where the page lies, and open it where there is a screen."""
    path = path.resolve()
    click.echo(path)
    if sys.stdout.isatty() and (
        sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    ):
        click.launch(path.as_uri())
