"""`torchwright rm`: models of the hub, removed from this machine."""

from __future__ import annotations

import click

from torchwright.cli.options import json_option
from torchwright.cli.printing import print_json, say


@click.command("rm")
@click.argument("models", metavar="ORG/NAME…", nargs=-1, required=True)
@json_option
def command(models: tuple[str, ...], as_json: bool) -> None:
    """Remove models of the hub from this machine, with all their revisions."""
    from torchwright.hub.hub_cache import remove_cached
    from torchwright.report.wording import size

    freed = {name: remove_cached(name) for name in models}
    if as_json:
        print_json({"freed": freed})
        return
    for name, count in freed.items():
        say(f"removed {name}: {size(count)} are free again")
