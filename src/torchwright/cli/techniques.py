"""`torchwright techniques`: what the search may try."""

from __future__ import annotations

import click

from torchwright.cli.options import json_option
from torchwright.cli.registries import list_rows, print_registry


@click.command("techniques")
@json_option
def command(as_json: bool) -> None:
    """List the techniques with their options."""
    print_registry(list_rows("techniques"), as_json)
