"""`torchwright techniques`: what the search may try."""

from __future__ import annotations

import click

from torchwright.cli.options import json_option
from torchwright.cli.registries import describe_registry, print_registry
from torchwright.process.interrupts import importing


@click.command("techniques")
@json_option
def command(as_json: bool) -> None:
    """List the techniques with their options."""
    with importing():  # the registry imports what it lists
        from torchwright.techniques import techniques as registry

        rows = describe_registry(registry)
    print_registry(rows, as_json)
