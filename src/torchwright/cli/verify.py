"""`torchwright verify`: an artifact against its own recipe."""

from __future__ import annotations

import click

from torchwright.cli.options import json_option, trust_option
from torchwright.cli.printing import print_result
from torchwright.process.interrupts import importing


@click.command("verify")
@click.argument("directory", metavar="DIR")
@trust_option
@json_option
def command(directory: str, trust: bool, as_json: bool) -> None:
    """Measure an artifact again; exit 1 on a regression.

    Speed and metric are held against the recipe, so that CI can run it.
    """
    with importing():
        from torchwright import api

    print_result(f"verify {directory}", api.verify(directory, trust=trust), as_json)
