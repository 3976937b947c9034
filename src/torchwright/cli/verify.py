"""`torchwright verify`: an artifact against its own recipe."""

from __future__ import annotations

from typing import Any

import click

from torchwright.cli.options import finite, json_option, quiet_option, trust_option
from torchwright.cli.printing import print_result
from torchwright.core.errors import Inconclusive, RegressionFound
from torchwright.core.process.interrupts import importing
from torchwright.core.records import VERIFY_RETRIES, VERIFY_TOLERANCE


@click.command("verify")
@click.argument("directory", metavar="DIR")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, max=1),
    metavar="SHARE",
    default=VERIFY_TOLERANCE,
    show_default=True,
    callback=finite,
    help="How far the speed may lie below the low end of the recipe's interval.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    metavar="N",
    default=VERIFY_RETRIES,
    show_default=True,
    help="How often to time it again where that decides nothing.",
)
@trust_option
@quiet_option
@json_option
def command(directory: str, quiet: bool, as_json: bool, **options: Any) -> None:
    """Measure an artifact again; exit 1 on a regression.

    Speed and metric are compared with the recipe, so that CI can run it. Exit 3 says that nothing was decided: other
    programs kept the machine busy.
    """
    with importing():
        from torchwright.optimization import api
    from torchwright.report.terminal import LiveProgress

    title = f"verify {directory}"
    try:
        with LiveProgress(quiet=quiet) as progress:
            found = api.verify(directory, on_event=progress, **options)
    except (RegressionFound, Inconclusive) as verdict:
        if not as_json:
            print_result(title, verdict.facts, as_json)
        raise
    print_result(title, found, as_json)
