"""`torchwright workloads`: what can be run."""

from __future__ import annotations

import click

from torchwright.cli.options import json_option
from torchwright.cli.registries import list_rows, print_registry


@click.command("workloads")
@json_option
def command(as_json: bool) -> None:
    """List the kinds of workload with their options."""
    print_registry(list_rows("workloads"), as_json)
