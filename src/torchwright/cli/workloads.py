"""`torchwright workloads`: what can be run."""

from __future__ import annotations

import click

from torchwright.cli.options import json_option
from torchwright.cli.registries import describe_registry, print_registry
from torchwright.process.interrupts import importing


@click.command("workloads")
@json_option
def command(as_json: bool) -> None:
    """List the kinds of workload with their options."""
    with importing():  # the registry imports what it lists
        from torchwright.workloads import workloads as registry

        rows = describe_registry(registry)
    print_registry(rows, as_json)
