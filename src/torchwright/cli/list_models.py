"""`torchwright list`: the models of the hub on this machine."""

from __future__ import annotations

import time

import click

from torchwright.cli.options import json_option
from torchwright.cli.printing import print_json, say


@click.command("list")
@json_option
def command(as_json: bool) -> None:
    """List the models of the hub on this machine, the last used one first."""
    from torchwright.hub.hub_cache import cached_models
    from torchwright.report.wording import size

    found = cached_models()
    if as_json:
        print_json([vars(model) for model in found])
        return
    if not found:
        say("no model of the hub is here: `torchwright pull ORG/NAME` downloads one")
        return
    width = max(len(model.name) for model in found)
    for model in found:
        day = time.strftime("%Y-%m-%d", time.localtime(model.used))
        say(f"{model.name:{width}}  {size(model.bytes):>8}  used {day}  {', '.join(model.revisions)}")
