"""`torchwright report`: print the path of a page; the page of a training run is written first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from torchwright.cli.options import all_option
from torchwright.cli.printing import console, say


@click.command("report")
@click.argument("directory", metavar="DIR")
@all_option
def command(directory: str, every: bool) -> None:
    """Print the path of report.html; open it on a screen.

    DIR is an artifact, or the folder of a training run, whose page is written now. With --all an artifact's waterfall
    is printed instead.
    """
    from torchwright.train.run.observe.metrics import is_run

    folder = Path(directory)
    if is_run(folder):
        if every:
            raise click.UsageError("--all is for artifacts, and DIR is the folder of a training run")
        from torchwright.train.run.observe import page
        from torchwright.train.run.runtime.folder import at_work

        _show(page.write(folder, live=at_work(folder)))
        return
    from torchwright.optimization.artifact.folder import read_recipe, report_path

    if not every:
        _show(report_path(folder))
        return
    from torchwright.report.terminal import waterfall

    console().print(waterfall(read_recipe(folder), artifact=directory, every=True))


def _show(path: Path) -> None:
    """Print the page's path, and open the page if there is a screen."""
    path = path.resolve()
    say(path)
    if sys.stdout.isatty() and (
        sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    ):
        click.launch(path.as_uri())
